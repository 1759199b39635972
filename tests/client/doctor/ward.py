"""Databases to be examined, and what mends them: a fix is run as it was told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.pool import NullPool

from qmq_client.commands.root import root
from qmq_client.doctor import Finding, Thresholds, examine
from qmq_client.outbox.table import create_tables
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Databases
from tests.services.ladder import recipe_or_install
from tests.services.private import PrivateServer, Recipe

#: MySQL's view of transactions shows the same for ever when it is read more often than every 0.1 s.
LOOK_S = 0.15
#: A fresh transaction is old, a fresh row has waited for long.
IMPATIENT = Thresholds(transaction_s_max=-1, prepared_s_max=0, overdue_s_max=0.5, unsent_s_max=0.5)


class WithOptions:
    """A recipe with further options of the server, which win over its own."""

    def __init__(self, recipe: Recipe, *options: str) -> None:
        self._recipe = recipe
        self.options = list(options)
        self.kind = recipe.kind
        self.user = recipe.user
        self.make_template = recipe.make_template
        self.url = recipe.url
        self.knock = recipe.knock

    def command(self, data: Path, port: int) -> list[str]:
        return [*self._recipe.command(data, port), *self.options]


@contextmanager
def a_server(databases: Databases, kind: str, *options: str) -> Iterator[PrivateServer]:
    """A server that was started badly."""
    recipe = WithOptions(recipe_or_install(databases.run, kind), *options)
    server = PrivateServer(databases.run, recipe)
    server.start()
    try:
        yield server
    finally:
        server.close()


def a_shop(server: PrivateServer, name: str = "shop") -> sa.Engine:
    """A database with our tables, each connection anew so that it sees what was set."""
    with sa.create_engine(
        server.url(), poolclass=NullPool, isolation_level="AUTOCOMMIT"
    ).connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine = sa.create_engine(server.url(name), poolclass=NullPool)
    create_tables(engine)
    return engine


def sound_sqlite(path: Path) -> sa.Engine:
    """A file as we would have it."""
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=NullPool)
    create_tables(engine)
    run(engine, "PRAGMA journal_mode = WAL")
    return engine


def run(engine: sa.Engine, statements: str) -> None:
    """Each of these, separated by "; ", as a person would; also a command of ours."""
    if statements.startswith("qmq "):
        command(engine, statements)
        return
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection:
        for statement in statements.split("; "):
            connection.exec_driver_sql(statement.replace("%", "%%"))


def command(engine: sa.Engine, line: str) -> str:
    """Run one of our commands on this database; what it printed."""
    url = engine.url.render_as_string(hide_password=False)
    done = CliRunner().invoke(root, [*line.split()[1:], "--database", url])
    assert done.exit_code == 0, done.output
    return done.output


def ids(findings: tuple[Finding, ...]) -> list[str]:
    return sorted(finding.id for finding in findings)


def finding_of(
    engine: sa.Engine, id_: str, *, thresholds: Thresholds | None = None
) -> Finding | None:
    """What an examination says of this check."""
    findings = examine(engine, thresholds=thresholds or Thresholds())
    return next((finding for finding in findings if finding.id == id_), None)


def until_found(look: Callable[[], Finding | None], *, is_there: bool) -> Finding | None:
    """Servers take some settings in a moment later; fails when it does not come to be so."""
    ends_at_s = monotonic() + DEADLINE_S
    while True:
        finding = look()
        if (finding is not None) is is_there:
            return finding
        assert monotonic() < ends_at_s, f"found: {finding}"
        threading.Event().wait(LOOK_S)


def mend(
    engine: sa.Engine,
    id_: str,
    *,
    by: sa.Engine | None = None,
    thresholds: Thresholds | None = None,
) -> Finding:
    """Find it, run its fix, find it no more."""

    def look() -> Finding | None:
        return finding_of(engine, id_, thresholds=thresholds)

    finding = until_found(look, is_there=True)
    assert finding is not None
    run(by or engine, finding.fix)
    until_found(look, is_there=False)
    return finding
