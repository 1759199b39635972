"""A user who may not write what it should: found with the GRANT, and gone when that is given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.pool import NullPool

from qmq_client.commands.root import root
from qmq_client.doctor import examine
from qmq_client.outbox.table import create_tables
from qmq_migrations.upgrade import migrate
from tests.client.doctor.ward import a_server, a_shop, finding_of, ids, mend, run
from tests.services.another_user import (
    a_database_in,
    a_directory_of_root,
    as_nobody,
    let_everybody_write,
    let_nobody_write,
)
from tests.services.databases import Database, Databases
from tests.services.private import PrivateServer

USERS = {"mysql": "'modest'@'%'", "postgresql": "modest"}
#: What a user is given, and what it then may not do to the outbox.
TOO_LITTLE = [
    ("SELECT", "INSERT, UPDATE, DELETE"),
    ("SELECT, INSERT", "UPDATE, DELETE"),
    ("SELECT, INSERT, UPDATE", "DELETE"),
    ("SELECT, INSERT, DELETE", "UPDATE"),
    ("SELECT, INSERT, DELETE, UPDATE (state)", "UPDATE"),
]
CONSUMERS = "consumer with an inbox, consumer that purges its inbox or nacks within a batch"
ENOUGH = [
    "SELECT, UPDATE, DELETE",
    "SELECT, DELETE, UPDATE (state, due_at_ms, token, attempts, last_error)",
    "SELECT, INSERT, UPDATE, DELETE",
]


@pytest.fixture(scope="module", params=["mysql", "postgresql"])
def server(request: pytest.FixtureRequest, databases: Databases) -> Iterator[PrivateServer]:
    with a_server(databases, request.param) as made:
        yield made


@pytest.fixture(scope="module")
def shop(server: PrivateServer) -> sa.Engine:
    return a_shop(server)


@pytest.fixture
def modest(shop: sa.Engine) -> Iterator[sa.Engine]:
    """A user who may look at everything else."""
    user = USERS[shop.dialect.name]
    if shop.dialect.name == "postgresql":
        run(
            shop,
            "CREATE ROLE modest LOGIN; GRANT pg_read_all_stats TO modest; "
            "GRANT SELECT, INSERT, DELETE ON qmq_inbox TO modest; "
            "GRANT SELECT, INSERT, UPDATE ON qmq_order_lock TO modest",
        )
    else:
        run(
            shop,
            f"CREATE USER {user}; GRANT PROCESS ON *.* TO {user}; GRANT TRIGGER ON shop.* TO {user}; "
            f"GRANT SELECT, INSERT, DELETE ON qmq_inbox TO {user}; "
            f"GRANT SELECT, INSERT, UPDATE ON qmq_order_lock TO {user}",
        )
    yield sa.create_engine(shop.url.set(username="modest"), poolclass=NullPool)
    gone = "DROP OWNED BY modest; DROP ROLE modest" if user == "modest" else f"DROP USER {user}"
    run(shop, gone)


@pytest.mark.parametrize(("given", "denied"), TOO_LITTLE)
def test_X1_O1_a_user_who_may_not_write_to_the_outbox_is_found_and_gone_after_the_grant(
    shop: sa.Engine, modest: sa.Engine, given: str, denied: str
) -> None:
    user = USERS[shop.dialect.name]
    run(shop, f"GRANT {given} ON qmq_outbox TO {user}")
    assert ids(examine(modest)) == ["rights.write"]
    finding = mend(modest, "rights.write", by=shop)
    assert finding.read == f"{user} may not {denied} on qmq_outbox"
    assert finding.fix.split("; ")[0] == f"GRANT {denied} ON qmq_outbox TO {user}"
    assert ids(examine(modest)) == []


@pytest.mark.parametrize("given", ENOUGH)
def test_X1_a_user_who_may_relay_is_no_finding_and_told_what_else_it_is_not(
    shop: sa.Engine, modest: sa.Engine, given: str
) -> None:
    user = USERS[shop.dialect.name]
    run(shop, f"GRANT {given} ON qmq_outbox TO {user}")
    if "INSERT" in given and user == "modest":
        note = finding_of(modest, "rights.role")
        assert note is not None
        assert note.fix == "GRANT USAGE ON SEQUENCE public.qmq_outbox_id_seq TO modest"
        run(shop, note.fix)
    elif "INSERT" not in given:
        assert ids(examine(modest)) == ["rights.role"]
        note = mend(modest, "rights.role", by=shop)
        assert "not for: producer, producer with `order_by_key`" in note.read
        assert f"enough for: {CONSUMERS}, watchdog" in note.read
    assert ids(examine(modest)) == []


def test_X1_a_user_who_may_not_write_to_the_inbox_is_told_so(
    shop: sa.Engine, modest: sa.Engine
) -> None:
    user = USERS[shop.dialect.name]
    run(shop, f"GRANT SELECT, INSERT, UPDATE, DELETE ON qmq_outbox TO {user}")
    if user == "modest":
        run(shop, "GRANT USAGE ON SEQUENCE qmq_outbox_id_seq TO modest")
    run(shop, f"REVOKE INSERT, DELETE ON qmq_inbox FROM {user}")
    note = mend(modest, "rights.role", by=shop)
    assert note.fix == f"GRANT INSERT, DELETE ON qmq_inbox TO {user}"
    assert ids(examine(modest)) == []


def test_X1_a_consumer_who_sees_its_inbox_alone_is_told_of_no_table_that_is_missing(
    shop: sa.Engine, modest: sa.Engine
) -> None:
    """MySQL shows a user only tables that it has a right on."""
    user = USERS[shop.dialect.name]
    run(shop, f"REVOKE SELECT, INSERT, UPDATE ON qmq_order_lock FROM {user}")
    if user != "modest":
        run(shop, f"REVOKE TRIGGER ON shop.* FROM {user}; GRANT TRIGGER ON qmq_inbox TO {user}")
    findings = examine(modest)
    assert {finding.id for finding in findings} == {"rights.missing", "rights.role"}
    (role,) = [finding.read for finding in findings if finding.id == "rights.role"]
    assert role.startswith(f"enough for: {CONSUMERS}; ")
    told = [finding.fix for finding in findings if finding.id == "rights.missing"]
    assert f"GRANT SELECT ON qmq_outbox TO {user}" in told
    assert len(set(told)) == len(told), "each is told once"
    for _ in range(3):  # one right may show what the next one is for
        for finding in examine(modest):
            run(shop, finding.fix)
    assert ids(examine(modest)) == []


def test_X1_who_may_not_read_the_revision_is_told_so_and_of_all_else(
    server: PrivateServer,
) -> None:
    whole = a_shop(server, "migrated")
    migrate(whole, may_adopt=True)
    other = "CREATE ROLE other LOGIN" if whole.dialect.name == "postgresql" else "CREATE USER other"
    given = "GRANT SELECT, INSERT, UPDATE, DELETE ON {} TO other"
    run(whole, other)
    for name in ("qmq_outbox", "qmq_inbox", "qmq_order_lock"):
        run(whole, given.format(name))
    run(whole, "ALTER TABLE qmq_inbox DROP COLUMN received_at_ms")
    limited = sa.create_engine(whole.url.set(username="other"), poolclass=NullPool)
    found = {finding.id: finding.fix for finding in examine(limited)}
    assert "schema.missing" in found
    if whole.dialect.name == "postgresql":
        assert found["rights.missing"] == "GRANT SELECT ON qmq_version TO other"


def test_X1_no_trigger_hears_of_it_when_rights_are_asked_for(
    postgresql_database: Database,
) -> None:
    """On PostgreSQL a trigger may listen to statements that change no row."""
    shop = postgresql_database.engine(poolclass=NullPool)
    create_tables(shop)
    raises = "CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no'';END'"
    run(shop, raises)
    run(
        shop,
        "CREATE TRIGGER told BEFORE INSERT OR UPDATE OR DELETE ON qmq_outbox "
        "FOR EACH STATEMENT EXECUTE FUNCTION told()",
    )
    assert ids(examine(shop)) == ["table.trigger"]


@pytest.mark.parametrize("journal_mode", ["delete", "wal"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_X1_W6_a_file_or_a_directory_that_may_only_be_read_is_found(
    what: str, journal_mode: str
) -> None:
    with a_directory_of_root() as folder:
        path = a_database_in(folder, journal_mode)
        refused = path if what == "file" else folder
        call = ["doctor", "--database", f"sqlite:///{path}"]
        assert "writable" not in CliRunner().invoke(root, call).output
        let_nobody_write(path, what)
        with as_nobody():
            done = CliRunner().invoke(root, call)
        assert f"{refused} is not writable" in done.output
        # In a directory where no log can be made, such a file is not even read.
        assert done.exit_code == (3 if (what, journal_mode) == ("directory", "wal") else 1)
        let_everybody_write(folder)
        with as_nobody():
            again = CliRunner().invoke(root, call)
        assert "writable" not in again.output
