"""`qmq db migrate | check | sql | downgrade`: manages QMQ's tables in an application's database.

The revisions are in `qmq_migrations`. An application with its own Alembic history may include these
revisions, or add `qmq_client.metadata` to its own metadata; it then needs only `qmq db check`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import sqlalchemy as sa

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.commands.settings import database_options, json_option, the_database
from qmq_client.database.engine import open_engine, section_tables
from qmq_client.database.errors import database_errors
from qmq_client.database.url import known_url
from qmq_client.doctor import sqlite
from qmq_client.doctor.drift import find_drift
from qmq_client.errors import ConfigurationError, DatabaseUnavailableError
from qmq_client.outbox.table import DEFAULT_PREFIX
from qmq_client.settings.sections import DatabaseSection
from qmq_migrations.adoption import ALEMBIC_TABLE
from qmq_migrations.errors import MigrationBusyError, MigrationError
from qmq_migrations.upgrade import downgrade as downgrade_tables
from qmq_migrations.upgrade import migrate as migrate_tables
from qmq_migrations.upgrade import upgrade_sql


@click.group()
def db() -> None:
    """Create, upgrade or check the tables in an application's database."""


@db.command()
@database_options
@json_option
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over tables that another Alembic history seems to have created.",
)
def migrate(database: str | None, config_file: Path | None, as_json: bool, adopt: bool) -> None:
    """Create or upgrade the tables.

    Safe to repeat, and to run from several processes at once. Exit code 2 when it cannot migrate
    safely: the schema is missing, tables of a recorded revision are gone, or another migration tool created them.
    """
    section = the_database(database, config_file)
    with _engine(section, may_create=True) as engine, _migration_errors(section):
        done = migrate_tables(
            engine,
            schema=section.schema or None,
            prefix=section.table_prefix,
            may_adopt=adopt,
        )
        with engine.connect() as connection:
            notes = list(_notes(connection, section))
    if as_json:
        shown = {"from": done.before, "to": done.after, "is_adopted": done.is_adopted}
        said = [{"read": read, "fix": fix} for read, fix in notes]
        click.echo(json.dumps({"database": section.name, **shown, "notes": said}))
        return
    if done.is_adopted:
        click.echo(f"{section.name}: existing tables adopted at {done.after}")
    elif done.before == done.after:
        click.echo(f"{section.name}: already at {done.after}")
    else:
        click.echo(f"{section.name}: {done.before or 'empty'} -> {done.after}")
    for read, fix in notes:
        click.echo(f"{section.name}: {read}\n  fix: {fix}")


def _notes(connection: sa.Connection, section: DatabaseSection) -> Iterator[tuple[str, str]]:
    """Problems that may follow although the tables are correct, each with its fix."""
    if sa.inspect(connection).has_table(ALEMBIC_TABLE, schema=section.schema or None):
        prefix = section.table_prefix
        here = "include_name"
        if prefix != DEFAULT_PREFIX:
            here = f"functools.partial(include_name, prefix={prefix!r})"
        yield (
            f"there is also {ALEMBIC_TABLE}: your next autogenerate would drop {prefix}outbox and "
            "the other tables of QMQ",
            f"in your env.py, `from qmq_migrations.exclusion import include_name` and "
            f"`context.configure(…, include_name={here})`",
        )
    if connection.dialect.name == "sqlite":
        for finding in sqlite.settings(connection, is_application=False):
            if finding.id.startswith("sqlite.journal"):
                yield f"{finding.read}: {finding.meaning}", finding.fix


@db.command()
@database_options
@json_option
def check(database: str | None, config_file: Path | None, as_json: bool) -> None:
    """Compare the tables with what this version needs.

    Exit code 1 when they differ.
    """
    section = the_database(database, config_file)
    with _engine(section) as engine, engine.connect() as connection:
        found = find_drift(connection, section_tables(section))
    if as_json:
        faults = [{"fault": drift.fault, "remedy": drift.remedy} for drift in found]
        click.echo(json.dumps({"database": section.name, "ok": not found, "faults": faults}))
    elif not found:
        click.echo(f"{section.name}: as it should be")
    else:
        for drift in found:
            click.echo(f"{section.name}: {drift.fault}\n  fix: {drift.remedy}")
    if found:
        raise SystemExit(ATTENTION)


@db.command()
@database_options
def sql(database: str | None, config_file: Path | None) -> None:
    """Print the SQL that `migrate` runs on an empty database, without connecting.

    For administrators who apply statements themselves.
    """
    section = the_database(database, config_file)
    kind = known_url(section, os.environ).get_backend_name()
    text = upgrade_sql(kind, schema=section.schema or None, prefix=section.table_prefix)
    click.echo(text, nl=False)


@db.command()
@click.argument("revision")
@database_options
@json_option
@click.option("--yes", is_flag=True, help="Confirm; waiting messages may be lost.")
def downgrade(
    revision: str, database: str | None, config_file: Path | None, as_json: bool, yes: bool
) -> None:
    """Go back to REVISION.

    `base` drops the tables with every message waiting in them. Stop producers and watchdogs first:
    they work only with the newest revision.
    """
    section = the_database(database, config_file)
    if not yes:
        raise ConfigurationError(
            setting="--yes",
            value=f"not given, and {section.name} may lose waiting messages",
            remedy="Check with `qmq outbox list`, then give --yes.",
        )
    with _engine(section) as engine, _migration_errors(section):
        done = downgrade_tables(
            engine, revision, schema=section.schema or None, prefix=section.table_prefix
        )
    if as_json:
        shown = {"database": section.name, "from": done.before, "to": done.after}
        click.echo(json.dumps(shown))
    else:
        click.echo(f"{section.name}: {done.before or 'empty'} -> {done.after or 'empty'}")


@contextmanager
def _engine(section: DatabaseSection, *, may_create: bool = False) -> Iterator[sa.Engine]:
    engine = open_engine(section, os.environ, may_create=may_create)
    try:
        with database_errors(section.name):
            yield engine
    finally:
        engine.dispose()


@contextmanager
def _migration_errors(section: DatabaseSection) -> Iterator[None]:
    try:
        yield
    except MigrationBusyError as error:
        raise DatabaseUnavailableError(f"database {section.name}: {error}") from error
    except MigrationError as error:
        raise ConfigurationError(
            setting=f"database {section.name}",
            value="not migrated",
            remedy=str(error),
        ) from error
