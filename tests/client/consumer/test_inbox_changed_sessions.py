"""A handler changes the session in which the inbox's own statements run: each finds the inbox, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import sqlalchemy as sa

from qmq_client.errors import InboxRowLostError, OutboxMissingError
from qmq_client.inbox import Inbox
from qmq_client.outbox.table import create_tables, make_tables
from tests.client.consumer.kit import GROUP
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.services.databases import Database

MakeDatabase = Callable[[str], Database]
ADD_ONE = sa.text("UPDATE tally SET n = n + 1")
#: On MySQL and MariaDB.
HIDE = sa.text(
    "CREATE TEMPORARY TABLE qmq_inbox (consumer_group VARCHAR(127) COLLATE ascii_bin, "
    "message_id BINARY(16), received_at_ms BIGINT, PRIMARY KEY (consumer_group, message_id))"
)
ONE, TWO = b"1" * 16, b"2" * 16

#: What a handler does; `{other}` is a schema or database with an inbox of its own.
CHANGES = {
    "sqlite": {
        "temporary table": "CREATE TEMP TABLE IF NOT EXISTS qmq_inbox "
        "AS SELECT * FROM main.qmq_inbox WHERE 0"
    },
    "mysql": {"database": "USE {other}"},
    "postgresql": {
        "search path": "SET search_path TO {other}",
        "search path of the transaction": "SET LOCAL search_path TO {other}",
        "temporary table": "CREATE TEMPORARY TABLE IF NOT EXISTS qmq_inbox "
        "(LIKE public.qmq_inbox INCLUDING ALL)",
    },
}
CASES = [(kind, name) for kind, changes in CHANGES.items() for name in changes]
#: Keeps its session's settings from one effect to the next.
ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0}


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_C5_an_inbox_is_found_in_a_session_that_a_handler_has_changed(
    make_database: MakeDatabase, kind: str, name: str
) -> None:
    database = make_database(kind)
    make_engine(database.url).dispose()
    other = make_another(make_database, database)
    change = sa.text(CHANGES[kind][name].format(other=other))
    inbox = Inbox(database.engine(**ONE_CONNECTION), group=GROUP)

    def is_new(message_id: bytes, *, is_forgotten: bool = False) -> bool:
        with inbox.open([message_id]) as work:
            work.session.execute(change)
            work.forgotten.update([message_id] * is_forgotten)
        return bool(work.new)

    found = [is_new(ONE), is_new(TWO, is_forgotten=True), is_new(ONE), is_new(TWO), is_new(TWO)]
    assert found == [True, True, False, True, False]
    truth = database.engine()
    assert rows_in_inbox(truth) == {(GROUP, ONE), (GROUP, TWO)}
    with truth.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_inbox SET received_at_ms = 1")
        if other:
            assert connection.exec_driver_sql(f"SELECT * FROM {other}.qmq_inbox").all() == []
    inbox.check()
    assert inbox.purge(timedelta(hours=1)) == 2


def make_another(make_database: MakeDatabase, database: Database) -> str:
    """A tenant's schema, or database of MySQL, with tables of its own; its name."""
    if database.kind == "mysql":
        another = make_database("mysql")
        create_tables(another.engine())
        return another.name
    if database.kind == "sqlite":
        return ""
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("tenant"))
    create_tables(engine, make_tables(sa.MetaData(), schema="tenant"))
    return "tenant"


def test_C5_a_temporary_table_that_hides_the_inbox_of_mysql_is_refused_once_and_gone_then(
    mysql_database: Database,
) -> None:
    """It does so under every name, for as long as the connection is open."""
    truth = make_engine(mysql_database.url)
    inbox = Inbox(mysql_database.engine(**ONE_CONNECTION), group=GROUP)
    with inbox.open([ONE]) as work:
        work.session.execute(HIDE)
    with pytest.raises(OutboxMissingError, match="DROP TEMPORARY TABLE"), inbox.open([TWO]):
        raise AssertionError("the handler would have run")
    assert rows_in_inbox(truth) == {(GROUP, ONE)}
    with inbox.open([ONE, TWO]) as work:
        assert work.new == {TWO}
    assert rows_in_inbox(truth) == {(GROUP, ONE), (GROUP, TWO)}
    truth.dispose()


def test_C5_an_id_that_cannot_be_forgotten_has_no_effect_either(mysql_database: Database) -> None:
    truth = make_engine(mysql_database.url)
    inbox = Inbox(mysql_database.engine(), group=GROUP)
    with pytest.raises(InboxRowLostError):
        handle(inbox, HIDE, forgotten=[TWO])
    assert (count_of(truth), rows_in_inbox(truth)) == (0, set())
    truth.dispose()


def test_C5_a_role_without_rights_that_a_handler_has_taken_is_refused_by_the_servers_own_error(
    postgresql_database: Database,
) -> None:
    truth = make_engine(postgresql_database.url)
    inbox = Inbox(postgresql_database.engine(), group=GROUP)
    with pytest.raises(sa.exc.ProgrammingError, match="permission denied"):
        handle(inbox, sa.text("SET LOCAL ROLE pg_monitor"))
    assert (count_of(truth), rows_in_inbox(truth)) == (0, set())
    truth.dispose()


def handle(inbox: Inbox, change: sa.TextClause, forgotten: Sequence[bytes] = ()) -> None:
    """One effect of two messages that ends with this statement."""
    with inbox.open([ONE, TWO]) as work:
        work.session.execute(ADD_ONE)
        work.session.execute(change)
        work.forgotten.update(forgotten)


def test_C5_a_schema_map_of_the_application_leads_to_no_other_inbox(
    postgresql_database: Database, make_database: MakeDatabase
) -> None:
    truth = make_engine(postgresql_database.url)
    make_another(make_database, postgresql_database)
    mapped = truth.execution_options(schema_translate_map={None: "tenant"})
    with Inbox(mapped, group=GROUP).open([ONE]):
        pass
    assert rows_in_inbox(truth) == {(GROUP, ONE)}
    truth.dispose()
