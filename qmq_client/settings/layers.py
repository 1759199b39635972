"""The layers that a configuration is made of: what the file says, and what the environment says.

A layer maps paths (`watchdog.batch_rows`, `database.orders.url`) to values and where they came from.
What is not known becomes a fault that names the nearest known key, and so does a variable that looks
like a slip of one; faults are gathered, not raised, so that all are told at once. Values are not
looked at here: `config.py` merges the layers and makes sections of them.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec

from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import (
    BrokerSection,
    DatabaseSection,
    RegistrySection,
    WatchdogSection,
)

CONFIG_FILE: Final = "qmq.toml"
#: Room for the most databases there may be, each with every key.
FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_NAME_CHARACTERS_MAX: Final = 120
#: One layer or several merged: path → value and origin.
Layer = dict[str, tuple[Any, str]]
SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "broker": BrokerSection,
    "watchdog": WatchdogSection,
    "registry": RegistrySection,
}
#: Keys of a database as a variable ends with them; its name is said before.
_DATABASE_KEYS: Final = {
    field.upper(): field for field in DatabaseSection.__struct_fields__ if field != "name"
}
_DATABASE_VARIABLE: Final = re.compile(
    rf"QMQ_DATABASE_(?:(?P<name>[A-Z0-9_]+)_)?(?P<key>{'|'.join(_DATABASE_KEYS)})\Z"
)
#: Variables of others that begin like ours: a secret that `password_env` may name, and what Kubernetes
#: gives every process when a service is called qmq-broker.
_OTHERS_VARIABLE: Final = re.compile(
    r"PASSWORD\Z|_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?\Z"
)
_SLIP_RATIO_MIN: Final = 0.85
#: Lower for a key alone, which is short: one letter in another place of `URL` is a third of it.
_KEY_SLIP_RATIO_MIN: Final = 0.66


def read_file(file: Path | None, faults: list[ConfigurationError]) -> Layer:
    """What `file` says, or else `qmq.toml` of the working directory if there is one.

    Raises `ConfigurationError` for a file that cannot be read at all.
    """
    path = Path(CONFIG_FILE) if file is None else file
    if file is None and not path.is_file():
        return {}
    origin, content = str(path), _parse(path)
    layer: Layer = {}
    for section, values in content.items():
        if section == "database":
            layer |= _read_databases(values, origin, faults)
        elif section not in SECTIONS:
            faults.append(unknown(section, [*SECTIONS, "database"], origin))
        elif not isinstance(values, dict):
            faults.append(wrong(section, "not one table", f"Write [{section}] once in {origin}."))
        else:
            layer |= _read_keys(section, values, SECTIONS[section], origin, faults)
    return layer


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            remedy = f"Give a file of at most {FILE_BYTES_MAX:,} bytes."
            raise wrong(str(path), "too long for a configuration", remedy)
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors put a mark at the begin
    except OSError as error:
        raise wrong(str(path), error.strerror or str(error), "Give a file that exists.") from error
    except ValueError as error:  # of the syntax, the encoding, or a number of thousands of digits
        raise wrong(str(path), f"not TOML: {error}", "Fix the file.") from error
    except RecursionError as error:
        raise wrong(str(path), "not TOML: nested too deeply", "Fix the file.") from error


def _read_databases(tables: Any, origin: str, faults: list[ConfigurationError]) -> Layer:
    layer: Layer = {}
    if not isinstance(tables, list):
        faults.append(wrong("database", "one table", f"Write [[database]] in {origin}."))
        return layer
    for number, table in enumerate(tables, start=1):
        name = table.get("name") if isinstance(table, dict) else None
        if not isinstance(name, str) or f"database.{name}.name" in layer:
            problem = "has no name" if name is None else f"name {name!r}"
            remedy = f"Give each [[database]] in {origin} a name of its own."
            faults.append(wrong(f"database {number}", problem, remedy))
            continue
        layer |= _read_keys(f"database.{name}", table, DatabaseSection, origin, faults)
    return layer


def _read_keys(
    section: str,
    values: Mapping[str, Any],
    struct: type[msgspec.Struct],
    origin: str,
    faults: list[ConfigurationError],
) -> Layer:
    """The known keys of one table; the others become faults."""
    known = struct.__struct_fields__
    faults += [unknown(key, known, origin, of=f"{section}.") for key in values if key not in known]
    return {f"{section}.{key}": (value, origin) for key, value in values.items() if key in known}


def read_environment(
    environment: Mapping[str, str], file: Layer, faults: list[ConfigurationError]
) -> Layer:
    """What the `QMQ_*` variables say; `file` has the databases that they may change."""
    known = {
        f"QMQ_{section}_{field}".upper(): f"{section}.{field}"
        for section, struct in SECTIONS.items()
        for field in struct.__struct_fields__
    }
    layer: Layer = {}
    # URLs first: they name the databases that the other keys belong to.
    for variable in sorted(environment, key=lambda each: (not each.endswith("URL"), each)):
        value = environment[variable]
        if path := known.get(variable):
            layer[path] = (value, variable)
        elif found := _DATABASE_VARIABLE.match(variable):
            try:
                name = _database_name(found, value, database_names(file | layer))
            except ConfigurationError as fault:
                faults.append(fault)
                continue
            if f"database.{name}.name" not in file | layer:
                layer[f"database.{name}.name"] = (name, variable)
            layer[f"database.{name}.{_DATABASE_KEYS[found['key']]}"] = (value, variable)
        elif near := _nearest_variable(variable, list(known)):
            remedy = f"Did you mean {near!r}?"
            faults.append(wrong(variable, "not known (in environment)", remedy))
    return layer


def _database_name(found: re.Match[str], value: str, names: Sequence[str]) -> str:
    """Whose key this is; a URL alone makes a database."""
    in_variable = found["name"]
    if in_variable is None and found["key"] == "URL":
        return name_from_url(value)
    if in_variable is None and len(names) == 1:
        return names[0]
    for name in names:
        if re.sub(r"[^A-Z0-9]", "_", name.upper()) == in_variable:
            return name
    if in_variable is not None and found["key"] == "URL":
        return str(in_variable).lower()
    listed = ", ".join(names) or "none"
    remedy = f"Write QMQ_DATABASE_<NAME>_{found['key']} with one of these: {listed}."
    raise wrong(found.string, "of no configured database", remedy)


def _nearest_variable(variable: str, known: Sequence[str]) -> str | None:
    """What was meant, when it looks like a slip: others may use names that begin as ours do."""
    if not variable.startswith("QMQ_") or _OTHERS_VARIABLE.search(variable):
        return None
    if variable in ("QMQ_BROKER", "QMQ_DATABASE", "QMQ_REGISTRY"):
        return f"{variable}_URL"
    if near := difflib.get_close_matches(variable, known, n=1, cutoff=_SLIP_RATIO_MIN):
        return near[0]
    words = variable.split("_")
    if words[1] != "DATABASE":
        return None
    best, meant = _KEY_SLIP_RATIO_MIN, None
    # Where the name ends and the key begins is not known: neither is of one word.
    for key, first in product(_DATABASE_KEYS, range(2, len(words))):
        ratio = difflib.SequenceMatcher(None, "_".join(words[first:]), key).ratio()
        if ratio > best:
            best, meant = ratio, "_".join([*words[:first], key])
    return meant


def name_from_url(url: str) -> str:
    """What a database is called that has only a URL."""
    last = url.split("?", 1)[0].rsplit("/", 1)[-1].rsplit("@", maxsplit=1)[-1]
    stem = last.rsplit(".", 1)[0] if "." in last.strip(".") else last
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem)[:63] or "database"


def database_names(layer: Layer) -> list[str]:
    """Names of the databases in the order in which they were first mentioned."""
    return [value for path, (value, _) in layer.items() if _is_name_path(path)]


def _is_name_path(path: str) -> bool:
    return path.startswith("database.") and path.endswith(".name")


def unknown(name: str, known: Sequence[str], origin: str, *, of: str = "") -> ConfigurationError:
    """The fault of a name that is not among the known; it names the nearest.

    `of`: what stands before each of them. It is not compared, or all of them would be near.
    """
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {of + near[0]!r}?" if near else f"Known: {', '.join(known) or 'none'}."
    return wrong(of + name, f"not known (in {origin})", remedy)


def wrong(setting: str, value: str, remedy: str) -> ConfigurationError:
    """A fault in a setting."""
    shown = " ".join(setting[:_NAME_CHARACTERS_MAX].split())
    return ConfigurationError(setting=shown, value=value, remedy=remedy)
