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
slip of one; all faults are told at once. Where each value came from is kept, for `qmq config show`.
Passwords are masked by `mask_secrets` wherever a URL is shown. It opens nothing
but the file: databases become engines in `database/engine.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from qmq_client.errors import ConfigurationError
from qmq_client.settings.layers import (
    Layer,
    database_names,
    name_from_url,
    read_environment,
    read_file,
    unknown,
    wrong,
)
from qmq_client.settings.masking import MASK, mask_secrets
from qmq_client.settings.sections import (
    RULES,
    BrokerSection,
    Config,
    DatabaseSection,
    RegistrySection,
    WatchdogSection,
)

#: Beyond it one process could not look at each of them every few seconds.
DATABASES_MAX: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value and where it came from."""

    #: As in the file: `watchdog.batch_rows`, `database.orders.url`.
    path: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration with its history."""

    config: Config
    settings: tuple[Setting, ...]

    def origin_of(self, path: str) -> str:
        """Where this setting came from: the command line, a variable, a file, or built-in."""
        return next((one.origin for one in self.settings if one.path == path), _BUILT_IN)

    def is_given(self, path: str) -> bool:
        """Whether somebody said this setting, be it with the built-in value."""
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
        known = f"{fault.remedy} " if names else ""  # "Known: none." helps nobody
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
                    break  # what is missing now was wrong, and is told already
                faults.append(_invalid(prefix, given, str(error)))
                if found is None or found["key"] not in left:
                    break
                del left[found["key"]]  # only the first fault is told; look for others
        self._faults += faults
        if faults or section is None:
            return None
        self.settings.extend(_settings(section, prefix, given))
        return section

    def raise_faults(self) -> None:
        """Raise what was wrong, all of it."""
        if len(self._faults) == 1:
            raise self._faults[0]
        if self._faults:
            shown = self._faults[:_FAULTS_SHOWN_MAX]
            listed = " ".join(f"({i}) {fault}" for i, fault in enumerate(shown, start=1))
            more = " …" if len(shown) < len(self._faults) else ""
            # Each is a sentence, and so is what comes of them.
            told = (listed + more).removesuffix(".")
            raise wrong(f"{len(self._faults)} settings", told, "Fix them all.")


def _broker_fault(prefix: str, given: Layer) -> ConfigurationError | None:
    url, origin = given.get("url", (None, ""))
    if prefix != "broker" or not isinstance(url, str) or _is_broker_url(url):
        return None
    shown = f"{mask_secrets(url)!r} from {origin}"
    return wrong("broker.url", shown, f"Use a URL like {BrokerSection().url}.")


def _is_broker_url(url: str) -> bool:
    try:
        return _BROKER.match(url) is not None and urlsplit(url).port != 0
    except ValueError:  # no number, or one that no port has
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
    if found is None:  # a key that is needed and missing
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
    """The value as it may be shown."""
    if path in _SECRETS:
        return MASK if value else value
    return mask_secrets(value) if isinstance(value, str) else value
