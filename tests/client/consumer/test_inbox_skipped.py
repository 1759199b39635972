"""A trigger that skips an id or stores another one in its place: no effect without its row, no ack without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client.consumer import consumer
from qmq_client.errors import InboxRowLostError
from qmq_client.inbox import Inbox
from qmq_client.outbox.table import create_tables, make_tables
from qmq_client.testing import drain
from tests.client.consumer.kit import GROUP, SUBJECT, Bench
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.services.databases import Database

SKIPPING = {
    "sqlite": [
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox "
        "WHEN NEW.message_id = x'{id}' BEGIN SELECT RAISE(IGNORE); END"
    ],
    "postgresql": [
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$",
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "WHEN (NEW.message_id = '\\x{id}') EXECUTE FUNCTION skip()",
    ],
}
ALTERING = {
    "mysql": [
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "SET NEW.message_id = IF(NEW.message_id = x'{id}', x'{known}', NEW.message_id)"
    ],
    "postgresql": [
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN NEW.message_id := '\\x{known}'; RETURN NEW; END$$",
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "WHEN (NEW.message_id = '\\x{id}') EXECUTE FUNCTION skip()",
    ],
}
#: What takes the place of an id that is not known either, by column.
STRANGER = {"message_id": "ff" * 16, "consumer_group": "somebody else"}
#: With an id that no message has, or for a group that nobody asks for.
REPLACING = {
    "mysql": [
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "SET NEW.{column} = IF(NEW.message_id = x'{id}', {stranger}, NEW.{column})"
    ],
    "postgresql": [
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS "
        "$$BEGIN NEW.{column} := {stranger}; RETURN NEW; END$$",
        "CREATE TRIGGER skip BEFORE INSERT ON qmq_inbox FOR EACH ROW "
        "WHEN (NEW.message_id = '\\x{id}') EXECUTE FUNCTION skip()",
    ],
    "sqlite": [
        "CREATE TRIGGER skip AFTER INSERT ON qmq_inbox WHEN NEW.message_id = x'{id}' "
        "BEGIN UPDATE qmq_inbox SET {column} = {stranger} WHERE message_id = x'{id}'; END"
    ],
}
#: After the row was written, and told to whoever wrote it; MySQL lets no trigger do this.
REPLACING_LATER = [
    "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
    "UPDATE qmq_inbox SET {column} = {stranger} WHERE message_id = NEW.message_id; "
    "RETURN NEW; END$$",
    "CREATE TRIGGER skip AFTER INSERT ON qmq_inbox FOR EACH ROW "
    "WHEN (NEW.message_id = '\\x{id}') EXECUTE FUNCTION skip()",
]
#: Not before the COMMIT, after everything that a client can ask for.
REPLACING_AT_LAST = [
    REPLACING_LATER[0],
    "CREATE CONSTRAINT TRIGGER skip AFTER INSERT ON qmq_inbox DEFERRABLE INITIALLY DEFERRED "
    "FOR EACH ROW WHEN (NEW.message_id = '\\x{id}') EXECUTE FUNCTION skip()",
]


def skip(engine: sa.Engine, message_id: bytes) -> Callable[[], None]:
    """Keep this id out of the inbox as a trigger would; what is returned undoes it."""
    if (kind := engine.dialect.name) in SKIPPING:
        with engine.begin() as connection:
            for statement in SKIPPING[kind]:
                connection.exec_driver_sql(statement.format(id=message_id.hex()))
        return lambda: unskip(engine)

    # SIGNAL SQLSTATE '02TRG' does this on MariaDB 11.8. A join with nothing does it on all.
    def without(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> tuple[str, Any]:
        if "qmq_inbox (consumer_group" in statement and message_id in parameters:
            head, values = statement.split("VALUES", 1)
            values, *returning = values.split(" RETURNING", 1)
            rows = values.strip().removeprefix("(").removesuffix(")").split("), (")
            picked = " UNION ALL ".join(
                f"SELECT {row} FROM DUAL WHERE {int(parameters[2 * at + 1] != message_id)}"
                for at, row in enumerate(rows)
            )
            statement = " RETURNING".join((head + picked, *returning))
        return statement, parameters

    sa.event.listen(engine, "before_cursor_execute", without, retval=True)
    return lambda: sa.event.remove(engine, "before_cursor_execute", without)


def unskip(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        place = " ON qmq_inbox" if engine.dialect.name == "postgresql" else ""
        connection.exec_driver_sql(f"DROP TRIGGER skip{place}")


@pytest.fixture
def shop(a_database: Database) -> sa.Engine:
    made = make_engine(a_database.url)
    made.dispose()
    return a_database.engine()


@pytest.mark.parametrize("batch_size", [1, 10])
def test_C2_C5_an_id_that_the_database_leaves_out_is_neither_handled_nor_acked(
    bench: Bench, shop: sa.Engine, batch_size: int
) -> None:
    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(shop), batch_size=batch_size)
    def handle(bodies: Any, session: Session) -> None:
        count = len(bodies) if batch_size > 1 else 1
        session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": count})

    one, bad, other = bench.put(*range(3))
    unskip_now = skip(shop, bytes.fromhex(bad))
    consumers = bench.consumers(handle)
    drain(consumers)
    noted = set() if batch_size > 1 else {(GROUP, bytes.fromhex(each)) for each in (one, other)}
    assert rows_in_inbox(shop) == noted
    assert count_of(shop) == len(noted)
    assert "duplicates" not in bench.counters(consumers)
    unskip_now()
    bench.clock.advance(3_600_000)
    drain(consumers)
    assert count_of(shop) == 3
    assert bench.broker.lag(SUBJECT, GROUP) == 0


@pytest.mark.parametrize("batch_size", [1, 10])
def test_C2_C5_an_id_in_whose_place_the_database_puts_a_known_one_is_not_taken_for_a_duplicate(
    bench: Bench, a_server_database: Database, batch_size: int
) -> None:
    make_engine(a_server_database.url).dispose()
    shop = a_server_database.engine()

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(shop), batch_size=batch_size)
    def handle(bodies: Any, session: Session) -> None:
        count = len(bodies) if batch_size > 1 else 1
        session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": count})

    (known,) = bench.put(0)
    consumers = bench.consumers(handle)
    drain(consumers)
    bad, _ = bench.put(1, 2)
    with shop.begin() as connection:
        for statement in ALTERING[a_server_database.kind]:
            connection.exec_driver_sql(statement.format(id=bad, known=known))
    drain(consumers)
    assert count_of(shop) == (2 if batch_size == 1 else 1)
    assert "duplicates" not in bench.counters(consumers)
    unskip(shop)
    bench.clock.advance(3_600_000)
    drain(consumers)
    assert count_of(shop) == 3
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def replace(engine: sa.Engine, message_id: str, column: str, statements: list[str]) -> None:
    """Let the database store this id with something else in that column."""
    kind = engine.dialect.name
    stranger = f"'{STRANGER[column]}'"
    if column == "message_id":
        stranger = f"'\\x{STRANGER[column]}'" if kind == "postgresql" else f"x{stranger}"
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(
                statement.format(id=message_id, column=column, stranger=stranger)
            )


@pytest.mark.parametrize("column", STRANGER)
@pytest.mark.parametrize("batch_size", [1, 10])
def test_C5_an_id_that_the_database_stores_as_another_new_one_has_no_effect_twice(
    bench: Bench, shop: sa.Engine, batch_size: int, column: str
) -> None:
    see_to_it_that_it_is_noted_as_given(bench, shop, batch_size, column, REPLACING)


@pytest.mark.parametrize("column", STRANGER)
@pytest.mark.parametrize("how", [REPLACING_LATER, REPLACING_AT_LAST], ids=["later", "at last"])
def test_C5_an_id_that_is_altered_after_it_was_stored_has_no_effect_twice(
    bench: Bench, postgresql_database: Database, column: str, how: list[str]
) -> None:
    make_engine(postgresql_database.url).dispose()
    shop = postgresql_database.engine()
    see_to_it_that_it_is_noted_as_given(bench, shop, 10, column, {"postgresql": how})


def test_C5_triggers_that_wait_for_the_commit_are_run_before_it_and_keep_no_sound_id_out(
    postgresql_database: Database,
) -> None:
    """Also in a schema and by a name that need quotes."""
    tables = make_tables(sa.MetaData(), schema="our % messages")
    shop = postgresql_database.engine()
    with shop.begin() as connection:
        connection.execute(sa.schema.CreateSchema("our % messages"))
        connection.exec_driver_sql("CREATE TABLE told (message_id BYTEA)")
        connection.exec_driver_sql(
            "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN INSERT INTO told VALUES (NEW.message_id); RETURN NEW; END$$"
        )
    create_tables(shop, tables)
    with shop.begin() as connection:
        connection.exec_driver_sql(
            'CREATE CONSTRAINT TRIGGER "at %% last" AFTER INSERT ON "our %% messages".qmq_inbox '
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tell()"
        )
    statements: list[str] = []
    sa.event.listen(shop, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with Inbox(shop, group=GROUP, tables=tables).open([bytes(16)]) as work:
        assert work.session.scalar(sa.text("SELECT count(*) FROM told")) == 0
    assert 'SET CONSTRAINTS "our %% messages"."at %% last" IMMEDIATE' in statements
    with shop.connect() as connection:
        assert connection.scalar(sa.text("SELECT message_id FROM told")) == bytes(16)


@pytest.mark.parametrize("column", STRANGER)
def test_C5_a_server_that_does_not_return_what_it_has_stored_is_asked_for_it(
    bench: Bench, mysql_database: Database, column: str
) -> None:
    """As MySQL, which knows no INSERT … RETURNING."""
    make_engine(mysql_database.url).dispose()
    shop = mysql_database.engine()

    def as_mysql(connection: sa.Connection) -> None:
        dialect: Any = connection.dialect
        dialect.is_mariadb = False

    sa.event.listen(shop, "engine_connect", as_mysql)
    see_to_it_that_it_is_noted_as_given(bench, shop, 10, column, REPLACING)


def see_to_it_that_it_is_noted_as_given(
    bench: Bench, shop: sa.Engine, batch_size: int, column: str, how: dict[str, list[str]]
) -> None:
    """Nothing is stored or acked while one of three ids is altered, and everything afterwards."""

    @consumer(SUBJECT, group=GROUP, inbox=sessionmaker(shop), batch_size=batch_size)
    def handle(bodies: Any, session: Session) -> None:
        count = len(bodies) if batch_size > 1 else 1
        session.execute(sa.text("UPDATE tally SET n = n + :count"), {"count": count})

    one, bad, other = bench.put(*range(3))
    replace(shop, bad, column, how[shop.dialect.name])
    consumers = bench.consumers(handle)
    drain(consumers)
    noted = set() if batch_size > 1 else {(GROUP, bytes.fromhex(each)) for each in (one, other)}
    assert rows_in_inbox(shop) == noted
    assert count_of(shop) == len(noted)
    assert "duplicates" not in bench.counters(consumers)
    unskip(shop)
    bench.clock.advance(3_600_000)
    drain(consumers)
    assert count_of(shop) == 3
    assert rows_in_inbox(shop) == {(GROUP, bytes.fromhex(each)) for each in (one, bad, other)}
    assert bench.broker.lag(SUBJECT, GROUP) == 0


def test_C5_the_error_names_the_table_and_the_message(shop: sa.Engine) -> None:
    inbox, bad = Inbox(shop, group=GROUP), bytes(15) + b"\7"
    with inbox.open([bytes(16)]):
        pass
    skip(shop, bad)
    match = f"qmq_inbox.*a trigger.*{bad.hex()}"
    for ids in ([bad], [bytes(16), bad]):
        with pytest.raises(InboxRowLostError, match=match), inbox.open(ids):
            raise AssertionError("the handler would have run")
    with inbox.open([bytes(16)]) as work:
        assert work.new == set()
