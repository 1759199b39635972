"""Settings of a process: built-in values, then `qmq.toml`, then `QMQ_*`, then the command line.

::

    [broker]                      QMQ_BROKER_URL, --broker
    url = "http://127.0.0.1:9470"
    [watchdog]                    QMQ_WATCHDOG_BATCH_ROWS, … : QMQ_<SECTION>_<KEY>
    batch_rows = 1000
    [[database]]                  QMQ_DATABASE_<NAME>_<KEY>, or QMQ_DATABASE_<KEY> for the only one
    name = "orders"
    url = "sqlite:///orders.db"
    password_env = "ORDERS_PASSWORD"    the password stays in the environment

    [registry]                    a table of further databases; see `sections.py`
    url = "postgresql://watchdog@db/control"

An unknown key is an error that names the nearest known one, and so is a variable that looks like a
misspelt one; all faults are reported at once. The origin of each value is stored for `qmq config
show`. Passwords are masked by `mask_secrets` wherever a URL is shown. It opens only the file:
`database/engine.py` opens databases.

Each source is a layer: paths (`watchdog.batch_rows`, `database.orders.url`) with values and their
origins. Faults are collected, not raised, and the layers are merged before values are checked.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from qmq_client.errors import ConfigurationError
from qmq_client.settings.masking import MASK, mask_secrets
from qmq_client.settings.sections import (
    RULES,
    BrokerSection,
    Config,
    DatabaseSection,
    RegistrySection,
    WatchdogSection,
)

#: Most databases that one process can sweep every few seconds.
DATABASES_MAX: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value and its origin."""

    #: As in the file: `watchdog.batch_rows`, `database.orders.url`.
    path: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration with the origins of its values."""

    config: Config
    settings: tuple[Setting, ...]

    def origin_of(self, path: str) -> str:
        """The origin of this setting: the command line, a variable, a file, or built-in."""
        return next((one.origin for one in self.settings if one.path == path), _BUILT_IN)

    def is_given(self, path: str) -> bool:
        """Whether this setting was given, even with the built-in value."""
        return self.origin_of(path) != _BUILT_IN


_Section = TypeVar("_Section", bound=msgspec.Struct)
#: Settings that are a secret as a whole.
_SECRETS: Final = frozenset({"broker.token"})
_BUILT_IN: Final = "built-in"
_FAULTS_SHOWN_MAX: Final = 50
_FLAG: Final = "command line"
_BROKER: Final = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?\Z")
_VALUE_SHOWN_CHARACTERS: Final = 200
_IN_ERROR: Final = re.compile(r" - at `\$\.(?P<key>\w+)`")


def load_config(
    *,
    environment: Mapping[str, str],
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    databases: Sequence[str] = (),
) -> LoadedConfig:
    """Read all layers; raises one `ConfigurationError` that names every wrong value.

    `file` must exist when it is given; without it `qmq.toml` is read when the working directory has
    one. `flags` maps paths to values, None meaning not given. `databases` are those named on the
    command line, by URL or by configured name: if there are any, no other is used.
    """
    faults: list[ConfigurationError] = []
    merged = read_file(file, faults)
    merged |= read_environment(environment, merged, faults)
    merged |= {path: (value, _FLAG) for path, value in (flags or {}).items() if value is not None}
    names = database_names(merged)
    if databases:
        names = list(dict.fromkeys(_choose(given, names, merged) for given in databases))
    if len(names) > DATABASES_MAX:
        raise ConfigurationError(
            setting="database",
            value=f"{len(names)} databases; allowed: {DATABASES_MAX}",
            remedy="Run another watchdog for the others.",
        )
    built = _Built(merged, faults)
    broker = built.section(BrokerSection, "broker")
    watchdog = built.section(WatchdogSection, "watchdog")
    registry = built.section(RegistrySection, "registry")
    sections = [built.section(DatabaseSection, f"database.{name}") for name in names]
    built.raise_faults()
    assert broker is not None, "a section without faults was built"
    assert watchdog is not None, "a section without faults was built"
    assert registry is not None, "a section without faults was built"
    config = Config(
        broker=broker,
        watchdog=watchdog,
        registry=registry,
        databases=tuple(one for one in sections if one),
    )
    return LoadedConfig(config=config, settings=tuple(built.settings))


def _choose(given: str, names: Sequence[str], merged: Layer) -> str:
    """The name for a database of the command line; a URL is added to what is known."""
    if "://" not in given:
        if given in names:
            return given
        fault = unknown(given, names, "--database")
        known = f"{fault.remedy} " if names else ""  # "Known: none." does not help
        remedy = f"{known}For a file: sqlite:///{given}. For a server: its URL, or a name of [[database]]."
        raise wrong(given, fault.value, remedy)
    first = name = name_from_url(given)
    number = 2
    while merged.get(f"database.{name}.url", (given, ""))[0] != given:
        name, number = f"{first}-{number}", number + 1
    merged[f"database.{name}.name"] = (name, _FLAG)
    merged[f"database.{name}.url"] = (given, _FLAG)
    return name


class _Built:
    """Sections as they are made from the merged layers, and what was wrong in them."""

    def __init__(self, merged: Layer, faults: list[ConfigurationError]) -> None:
        self._merged = merged
        self.settings: list[Setting] = []
        self._faults = faults

    def section(self, struct: type[_Section], prefix: str) -> _Section | None:
        """The section; None when a value in it is wrong."""
        given = {
            field: self._merged[f"{prefix}.{field}"]
            for field in struct.__struct_fields__
            if f"{prefix}.{field}" in self._merged
        }
        faults = [fault] if (fault := _broker_fault(prefix, given)) else []
        left, section = dict(given), None
        while section is None:
            values = {key: value for key, (value, _) in left.items()}
            try:
                section = msgspec.convert(values, struct, strict=False)
            except msgspec.ValidationError as error:
                found = _IN_ERROR.search(str(error))
                if found is None and faults:
                    break  # what is missing now was wrong, and is reported already
                faults.append(_invalid(prefix, given, str(error)))
                if found is None or found["key"] not in left:
                    break
                del left[found["key"]]  # only the first fault is reported; look for others
        self._faults += faults
        if faults or section is None:
            return None
        self.settings.extend(_settings(section, prefix, given))
        return section

    def raise_faults(self) -> None:
        """Raise all collected faults as one error."""
        if len(self._faults) == 1:
            raise self._faults[0]
        if self._faults:
            shown = self._faults[:_FAULTS_SHOWN_MAX]
            listed = " ".join(f"({i}) {fault}" for i, fault in enumerate(shown, start=1))
            more = " …" if len(shown) < len(self._faults) else ""
            # Each fault is a sentence, and so is the joined text.
            texts = (listed + more).removesuffix(".")
            raise wrong(f"{len(self._faults)} settings", texts, "Fix them all.")


def _broker_fault(prefix: str, given: Layer) -> ConfigurationError | None:
    url, origin = given.get("url", (None, ""))
    if prefix != "broker" or not isinstance(url, str) or _is_broker_url(url):
        return None
    shown = f"{mask_secrets(url)!r} from {origin}"
    return wrong("broker.url", shown, f"Use a URL like {BrokerSection().url}.")


def _is_broker_url(url: str) -> bool:
    try:
        return _BROKER.match(url) is not None and urlsplit(url).port != 0
    except ValueError:  # not a number, or not a valid port
        return False


def _settings(section: msgspec.Struct, prefix: str, given: Layer) -> Iterator[Setting]:
    for field in section.__struct_fields__:
        origin = given[field][1] if field in given else _BUILT_IN
        value = getattr(section, field)
        shown = _without_secret(f"{prefix}.{field}", value)
        yield Setting(path=f"{prefix}.{field}", value=shown, origin=origin)


def _invalid(prefix: str, given: Layer, problem: str) -> ConfigurationError:
    found = _IN_ERROR.search(problem)
    expected = _IN_ERROR.sub("", problem)
    if found is None:  # a required key that is missing
        return wrong(prefix, expected.removeprefix("Object "), "Add it.")
    for pattern, rule in RULES.items():
        if repr(pattern) in expected:
            expected = rule
    value, origin = given[found["key"]]
    path = f"{prefix}.{found['key']}"
    shown = str(_without_secret(path, str(value)))
    if len(shown) > _VALUE_SHOWN_CHARACTERS:
        shown = f"{shown[:_VALUE_SHOWN_CHARACTERS]}…"
    return wrong(path, f"{shown!r} from {origin}", f"{expected}.")


def _without_secret(path: str, value: Any) -> Any:
    """The value without secrets."""
    if path in _SECRETS:
        return MASK if value else value
    return mask_secrets(value) if isinstance(value, str) else value


CONFIG_FILE: Final = "qmq.toml"
#: Room for the largest number of databases, each with every key.
FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_NAME_CHARACTERS_MAX: Final = 120
#: One layer or several merged: path → value and origin.
Layer = dict[str, tuple[Any, str]]
SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "broker": BrokerSection,
    "watchdog": WatchdogSection,
    "registry": RegistrySection,
}
#: Endings of variables for keys of a database; the database's name comes before.
_DATABASE_KEYS: Final = {
    field.upper(): field for field in DatabaseSection.__struct_fields__ if field != "name"
}
_DATABASE_VARIABLE: Final = re.compile(
    rf"QMQ_DATABASE_(?:(?P<name>[A-Z0-9_]+)_)?(?P<key>{'|'.join(_DATABASE_KEYS)})\Z"
)
#: Foreign variables with the same prefix: a secret that `password_env` may name, and variables that
#: Kubernetes sets if a service is called qmq-broker.
_OTHERS_VARIABLE: Final = re.compile(
    r"PASSWORD\Z|_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?\Z"
)
_SLIP_RATIO_MIN: Final = 0.85
#: Lower for a key alone, which is short: one wrong letter in `URL` is a third of it.
_KEY_SLIP_RATIO_MIN: Final = 0.66


def read_file(file: Path | None, faults: list[ConfigurationError]) -> Layer:
    """The settings of `file`, or of `qmq.toml` in the working directory if it exists.

    Raises `ConfigurationError` for an unreadable file.
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
        return tomllib.loads(
            data.decode("utf-8-sig")
        )  # some editors write a byte order mark at the beginning
    except OSError as error:
        raise wrong(
            str(path), error.strerror or str(error), "Give a file that this process can read."
        ) from error
    except (
        ValueError
    ) as error:  # errors of syntax or encoding, or a number with thousands of digits
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
    """The settings of the `QMQ_*` variables; `file` has the databases that they may change."""
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
    """The database of this key; a URL alone defines a database."""
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
    """The nearest known variable, if this one looks misspelt: other programs may use names with the same prefix."""
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
    # The boundary between name and key is unknown, because both may have several words.
    for key, first in product(_DATABASE_KEYS, range(2, len(words))):
        ratio = difflib.SequenceMatcher(None, "_".join(words[first:]), key).ratio()
        if ratio > best:
            best, meant = ratio, "_".join([*words[:first], key])
    return meant


def name_from_url(url: str) -> str:
    """The name of a database that has only a URL."""
    last = url.split("?", 1)[0].rsplit("/", 1)[-1].rsplit("@", maxsplit=1)[-1]
    stem = last.rsplit(".", 1)[0] if "." in last.strip(".") else last
    return re.sub(r"[^A-Za-z0-9_-]", "-", stem)[:63] or "database"


def database_names(layer: Layer) -> list[str]:
    """Names of the databases in the order in which they were first mentioned."""
    return [value for path, (value, _) in layer.items() if _is_name_path(path)]


def _is_name_path(path: str) -> bool:
    return path.startswith("database.") and path.endswith(".name")


def unknown(name: str, known: Sequence[str], origin: str, *, of: str = "") -> ConfigurationError:
    """The fault of an unknown name; it suggests the nearest known one.

    `of`: a common prefix of all names. It is not compared, otherwise all names would be near.
    """
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"Did you mean {of + near[0]!r}?" if near else f"Known: {', '.join(known) or 'none'}."
    return wrong(of + name, f"not known (in {origin})", remedy)


def wrong(setting: str, value: str, remedy: str) -> ConfigurationError:
    """A fault in a setting."""
    shown = " ".join(setting[:_NAME_CHARACTERS_MAX].split())
    return ConfigurationError(setting=shown, value=value, remedy=remedy)
