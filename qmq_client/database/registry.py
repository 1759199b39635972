"""The registry: a table of databases with outboxes, which may be changed while watchdogs run.

It holds no secret. A row names the environment variable or the file with a password, and a URL that
contains a password is refused, both when it is written and when it is read. A user who may write
the table could have any secret of the watchdog sent to a server of their choice. So the name of the
variable must contain PASSWORD, and the file must be in the configured directory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from qmq_client.database.engine import open_engine
from qmq_client.database.errors import database_errors
from qmq_client.errors import ConfigurationError, OutboxMissingError
from qmq_client.settings.config import DATABASES_MAX
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import DatabaseSection, RegistrySection

_PASSWORD_VARIABLE: Final = re.compile(r"\A[A-Z0-9_]*PASSWORD[A-Z0-9_]*\Z")
_NAME: Final = "registry"
#: Stands for all rows over the limit in `RegistryContent.refused`; no database can have this name.
_REST: Final = "[others]"
_URL_CHARACTERS_MAX: Final = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredDatabase:
    """One row of the registry."""

    section: DatabaseSection
    is_enabled: bool


@dataclass(slots=True, kw_only=True)
class RegistryContent:
    """The content of the table."""

    databases: list[RegisteredDatabase] = field(default_factory=list)
    #: The errors of invalid rows, by name.
    refused: dict[str, ConfigurationError] = field(default_factory=dict)

    def enabled(self) -> list[DatabaseSection]:
        """The databases to sweep."""
        return [each.section for each in self.databases if each.is_enabled]


class Registry:
    """Reads and changes the table. Holds no connection between calls.

    Raises `DatabaseUnavailableError`, and `ConfigurationError` if the table does not exist.
    """

    def __init__(
        self,
        section: RegistrySection,
        environment: Mapping[str, str],
        prepare: Callable[[sa.Engine], object] = lambda _: None,
    ) -> None:
        """`prepare` is called with each engine before its use, for example to set timeouts."""
        self._section = section
        self._environment = environment
        self._prepare = prepare
        self._table = _table(section)

    def create(self) -> bool:
        """Create the table if it is missing; returns whether it was created."""
        with self._connect(may_create=True) as connection:
            if sa.inspect(connection).has_table(self._table.name, schema=self._table.schema):
                return False
            self._table.create(connection)
            return True

    def read(self) -> RegistryContent:
        """All rows in order of their names; invalid ones with the reason."""
        content = RegistryContent()
        query = sa.select(self._table).order_by(self._table.c.name).limit(DATABASES_MAX + 1)
        with self._connect() as connection:
            rows = connection.execute(query).mappings().all()
        if len(rows) > DATABASES_MAX:
            value = f"more than {DATABASES_MAX:,} rows; those after {rows[-2]['name']} are left out"
            remedy = "Run another watchdog for the others, with a registry table of its own."
            content.refused[_REST] = _refused(_REST, value, remedy)
        for row in rows[:DATABASES_MAX]:
            name = str(row["name"])
            try:
                content.databases.append(self._read_row(row))
            except ConfigurationError as error:
                content.refused[name] = error
        return content

    def add(self, section: DatabaseSection, *, is_enabled: bool = True) -> bool:
        """Write a row, replacing one of this name; returns whether it is new.

        Raises `ConfigurationError` if the row is invalid.
        """
        self._check(section)
        values = msgspec.structs.asdict(section)
        values["schema_name"] = values.pop("schema")
        with self._connect() as connection:
            there = self._table.c.name == section.name
            removed = connection.execute(sa.delete(self._table).where(there)).rowcount
            connection.execute(sa.insert(self._table).values(**values, is_enabled=is_enabled))
        return not removed

    def remove(self, name: str) -> bool:
        """Delete a row; returns whether it existed."""
        with self._connect() as connection:
            there = self._table.c.name == name
            return connection.execute(sa.delete(self._table).where(there)).rowcount > 0

    def set_enabled(self, name: str, *, is_enabled: bool) -> bool:
        """Switch the sweeping of a database on or off; returns whether it exists."""
        there = self._table.c.name == name
        with self._connect() as connection:
            if connection.scalar(sa.select(self._table.c.name).where(there)) is None:
                return False
            change = sa.update(self._table).where(there).values(is_enabled=is_enabled)
            connection.execute(change)
            return True

    @contextmanager
    def _connect(self, *, may_create: bool = False) -> Iterator[sa.Connection]:
        section = DatabaseSection(
            name=_NAME,
            url=self._section.url,
            password_env=self._section.password_env,
            password_file=self._section.password_file,
        )
        engine = open_engine(section, self._environment, may_create=may_create)
        self._prepare(engine)
        try:
            with database_errors(_NAME, remedy=""), engine.begin() as connection:
                yield connection
        except OutboxMissingError as error:
            raise ConfigurationError(
                setting="registry.table",
                value=str(error).rstrip(". "),
                remedy="Run `qmq watchdog databases init`.",
            ) from error
        finally:
            engine.dispose()

    def _read_row(self, row: Mapping[Any, Any]) -> RegisteredDatabase:
        values = {field: row[field] for field in DatabaseSection.__struct_fields__ if field in row}
        values["schema"] = row["schema_name"]
        try:
            section = msgspec.convert(values, DatabaseSection, strict=False)
        except msgspec.ValidationError as error:
            raise _refused(
                str(row["name"]), str(error), "Write the row again: `qmq watchdog databases add`."
            ) from None
        self._check(section)
        return RegisteredDatabase(section=section, is_enabled=bool(row["is_enabled"]))

    def _check(self, section: DatabaseSection) -> None:
        try:
            has_password = make_url(section.url).password is not None
        except (sa.exc.ArgumentError, ValueError):
            # Without the cause, which would show the URL
            raise _refused(
                section.name,
                "not a database URL",
                "Write it like sqlite:////var/lib/shop/orders.db.",
            ) from None
        if has_password or mask_secrets(section.url) != section.url:
            raise _refused(
                section.name,
                "the URL has a password in it",
                "Remove it, change that password, and use password_env or password_file.",
            )
        if len(section.url) > _URL_CHARACTERS_MAX:
            value = f"the URL has {len(section.url)} characters"
            raise _refused(section.name, value, f"Give {_URL_CHARACTERS_MAX} at most.")
        if section.password_env and not _PASSWORD_VARIABLE.match(section.password_env):
            raise _refused(
                section.name,
                f"password_env {section.password_env!r}",
                "Give a variable whose name contains PASSWORD, in capitals.",
            )
        if section.password_file:
            self._check_file(section)

    def _check_file(self, section: DatabaseSection) -> None:
        directory = self._section.password_directory
        if not directory:
            remedy = "Set registry.password_directory in qmq.toml first."
            raise _refused(section.name, "password_file is not allowed", remedy)
        if not _is_inside(section.password_file, directory):
            remedy = f"Put it into {directory}, the registry's password_directory."
            raise _refused(section.name, f"password_file {section.password_file!r}", remedy)


def _is_inside(path: str, directory: str) -> bool:
    try:
        return Path(directory).resolve() in Path(path).resolve().parents
    except (OSError, RuntimeError, ValueError):  # a loop of links, or not a path
        return False


def _table(section: RegistrySection) -> sa.Table:
    # By MySQL's default collation `shop` and `Shop` would be one row.
    name = sa.String(63).with_variant(sa.String(63, collation="ascii_bin"), "mysql", "mariadb")
    return sa.Table(
        section.table,
        sa.MetaData(),
        sa.Column("name", name, primary_key=True),
        sa.Column("url", sa.String(_URL_CHARACTERS_MAX), nullable=False),
        sa.Column("password_env", sa.String(255), nullable=False, server_default=""),
        sa.Column("password_file", sa.String(1_024), nullable=False, server_default=""),
        sa.Column("schema_name", sa.String(32), nullable=False, server_default=""),
        sa.Column("table_prefix", sa.String(32), nullable=False, server_default="qmq_"),
        sa.Column("rows_per_s", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("keep_sent_s", sa.Double(), nullable=False, server_default="0"),
        sa.Column("keep_inbox_s", sa.Double(), nullable=False, server_default="0"),
        sa.Column("is_enabled", sa.Boolean(), nullable=False, server_default=sa.true()),
        schema=section.schema or None,
    )


def _refused(name: str, value: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"registry: {name}", value=value, remedy=remedy)
