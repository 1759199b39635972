"""Stand-alone migration: brings one database to the newest revision, or prints the statements.

Works from an installed package without an alembic.ini. The revision is kept in its own version table
(`qmq_version`), apart from an Alembic history of the application. Several processes may start it at
once. If it is killed, run it again.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

from qmq_migrations.adoption import (
    refuse_missing_schema,
    refuse_missing_tables,
    refuse_unrecorded_tables,
    will_adopt,
)
from qmq_migrations.errors import NoRevisionError, UnknownRevisionError
from qmq_migrations.lock import lock_for

#: Alembic's script location. An application puts `VERSIONS` into its `version_locations`.
SCRIPTS: Final = Path(__file__).resolve().parent
VERSIONS: Final = SCRIPTS / "versions"
HEAD: Final = "qmq@head"
_BASE: Final = "base"
_WAIT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """The result of a run."""

    #: The revision before the run; None if none was recorded.
    before: str | None
    #: The revision after the run: the newest one after an upgrade, None after a downgrade to `base`.
    after: str | None
    #: Whether the run took over tables without a revision, which `create_tables` had made.
    is_adopted: bool = False


def migrate(
    engine: sa.Engine,
    *,
    schema: str | None = None,
    prefix: str = "qmq_",
    may_adopt: bool = False,
    wait_s: float = _WAIT_S,
) -> Migrated:
    """Create or upgrade the tables to the newest revision.

    Adopts tables without a revision; if there is another Alembic history next to them, only with
    `may_adopt`. Waits at most `wait_s` for another migration of the same database. Raises
    `MigrationError`, and SQLAlchemy's own errors for those of the database.
    """
    config = _config(schema, prefix)
    with _locked(engine, schema, wait_s) as connection:
        refuse_missing_schema(connection, schema)
        before = _revision(connection, schema, prefix)
        refuse_missing_tables(connection, before, schema, prefix)
        is_adopted = before is None and will_adopt(connection, schema, prefix, may_adopt=may_adopt)
        config.attributes["connection"] = connection
        command.upgrade(config, HEAD)
        after = _revision(connection, schema, prefix)
    assert after is not None, "an upgrade leaves a revision"
    return Migrated(before=before, after=after, is_adopted=is_adopted)


def downgrade(
    engine: sa.Engine,
    revision: str,
    *,
    schema: str | None = None,
    prefix: str = "qmq_",
    wait_s: float = _WAIT_S,
) -> Migrated:
    """Go back to an older revision, or to `base`, which drops the tables with everything in them.

    Locks and raises like `migrate`. Does nothing to a database that is already at an older revision.
    """
    config = _config(schema, prefix)
    known = [_BASE, *reversed([each.revision for each in _scripts(config).walk_revisions()])]
    if revision not in known:
        raise NoRevisionError(f"There is no revision {revision}; choose one of: {', '.join(known)}")
    with _locked(engine, schema, wait_s) as connection:
        before = _revision(connection, schema, prefix)
        if before is None:
            refuse_unrecorded_tables(connection, schema, prefix)
        if before in known and known.index(before) > known.index(revision):
            config.attributes["connection"] = connection
            command.downgrade(config, f"qmq@{revision}")
        after = _revision(connection, schema, prefix)
    return Migrated(before=before, after=after)


def upgrade_sql(dialect_name: str, *, schema: str | None = None, prefix: str = "qmq_") -> str:
    """The SQL statements that bring an empty database to the newest revision."""
    text = io.StringIO()
    config = _config(schema, prefix, output=text)
    config.attributes["dialect_name"] = dialect_name
    command.upgrade(config, HEAD, sql=True)
    return text.getvalue()


def current_revision(
    engine: sa.Engine, *, schema: str | None = None, prefix: str = "qmq_"
) -> str | None:
    """The revision in the database's version table; None without one."""
    with engine.connect() as connection:
        return _revision(connection, schema, prefix)


def newest_revision() -> str:
    """The revision that this version of the product needs."""
    revision = _scripts(_config(None, "qmq_")).get_current_head()
    assert revision is not None, "there is a first revision"
    return revision


def _scripts(config: Config) -> ScriptDirectory:
    return ScriptDirectory.from_config(config)


def _config(schema: str | None, prefix: str, output: io.StringIO | None = None) -> Config:
    config = Config() if output is None else Config(output_buffer=output)
    for name, value in (
        ("script_location", str(SCRIPTS)),
        ("path_separator", "os"),
        ("qmq_schema", schema or ""),
        ("qmq_prefix", prefix),
    ):
        config.set_main_option(name, value.replace("%", "%%"))  # the parser interpolates `%`
    return config


def _revision(connection: sa.Connection, schema: str | None, prefix: str) -> str | None:
    options = {"version_table": f"{prefix}version", "version_table_schema": schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


@contextmanager
def _locked(engine: sa.Engine, schema: str | None, wait_s: float) -> Iterator[sa.Connection]:
    with (
        engine.connect() as connection,
        lock_for(connection, wait_s, schema),
        _unknown_revisions(),
    ):
        yield connection


@contextmanager
def _unknown_revisions() -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise UnknownRevisionError(
            f"The revision of its tables is unknown to this version of QMQ ({error}). Upgrade QMQ."
        ) from error
