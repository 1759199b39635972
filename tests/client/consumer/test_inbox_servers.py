"""The inbox on servers: several ids at once, two transactions at once, and what it costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

from qmq_client.errors import OutboxMissingError
from qmq_client.inbox import Inbox
from tests.client.consumer.kit import GROUP, WAIT_S
from tests.client.consumer.shop import count_of, make_engine, rows_in_inbox
from tests.services.databases import Database, is_mariadb

LEVELS = ["READ COMMITTED", "REPEATABLE READ"]


def ids(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16) for number in numbers]


@pytest.fixture(params=LEVELS)
def inbox(request: pytest.FixtureRequest, a_server_database: Database) -> Inbox:
    made = make_engine(a_server_database.url)
    made.dispose()
    return Inbox(a_server_database.engine(isolation_level=request.param), group=GROUP)


def note(inbox: Inbox, *numbers: int) -> set[int]:
    with inbox.open(ids(*numbers)) as work:
        return {int.from_bytes(one) for one in work.new}


def note_at_last(inbox: Inbox, *numbers: int) -> set[int]:
    """As redeliveries do. PostgreSQL refuses what its REPEATABLE READ must not see."""
    try:
        return note(inbox, *numbers)
    except sa.exc.OperationalError as error:
        if getattr(error.orig, "sqlstate", "") != "40001":
            raise
    return note(inbox, *numbers)


def test_C5_of_several_ids_only_those_are_new_that_were_not_there(inbox: Inbox) -> None:
    assert note(inbox, 5, 3) == {3, 5}
    assert note(inbox, 9, 3, 1, 9, 5, 7) == {1, 7, 9}
    assert note(inbox, 9, 3, 1) == set()
    assert note(inbox, *range(1_200)) == set(range(1_200)) - {1, 3, 5, 7, 9}


def test_F32_C5_an_id_that_another_transaction_is_noting_is_waited_for(inbox: Inbox) -> None:
    """And is then new or not, as that one ends."""
    found: list[set[int]] = []
    for number, is_undone in ((1, False), (2, True)):
        other = threading.Thread(target=lambda one=number: found.append(note_at_last(inbox, one)))
        try:
            with inbox.open(ids(number)) as work:
                assert work.new
                other.start()
                wait_until_it_waits(work.session.get_bind().engine)
                if is_undone:
                    raise LookupError
        except LookupError:
            pass
        other.join(WAIT_S)
    assert found == [set(), {2}]


WAITING = {
    # Not innodb_trx: read more often than every 0.1 s it shows the same for ever.
    "mysql": "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'",
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'",
}


def wait_until_it_waits(engine: sa.Engine) -> None:
    ends = threading.Event()
    timer = threading.Timer(WAIT_S, ends.set)
    timer.start()
    database = engine.dialect.name.replace("mariadb", "mysql")
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        while not int(connection.exec_driver_sql(WAITING[database]).one()[-1]):
            assert not ends.is_set(), "it does not wait"
    timer.cancel()


def test_C5_a_snapshot_older_than_the_id_does_not_make_it_new_again(inbox: Inbox) -> None:
    """An application that reads at the begin of its transactions sees the past from then on."""
    reads: list[int] = []
    engine = inbox._notes.engine

    @sa.event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        if reads:
            return
        reads.append(connection.exec_driver_sql("SELECT n FROM tally").scalar_one())
        assert note(inbox, 1, 2) == {1, 2}  # another transaction, while this one has begun

    assert note_at_last(inbox, 1, 2, 3) == {3}


def test_F32_C5_many_consumers_with_the_same_messages_have_each_effect_once(inbox: Inbox) -> None:
    """A deadlock may undo an attempt, but never makes an effect of it."""
    engine = inbox._notes.engine
    together = threading.Barrier(6)
    undone: list[str] = []

    def attempt(first: int) -> None:
        together.wait(WAIT_S)
        for start in range(first, 40, 2):
            handle(list(range(start, start + 4)))

    def handle(numbers: list[int]) -> None:
        while True:
            try:
                with inbox.open(ids(*numbers)) as work:
                    count = {"count": len(work.new)}
                    work.session.execute(sa.text("UPDATE tally SET n = n + :count"), count)
            except sa.exc.OperationalError as error:
                undone.append(str(error.orig))
            else:
                return

    threads = [threading.Thread(target=attempt, args=(number % 2,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S * 2)
    assert count_of(engine) == len(rows_in_inbox(engine)) == 43
    allowed = ("1213", "serialize", "deadlock")
    assert [text for text in undone if not any(word in text for word in allowed)] == []


def test_purging_forgets_old_ids_while_others_are_noted(inbox: Inbox) -> None:
    """The open transaction holds its new row; a purge that waited for it would never return."""
    note(inbox, *range(2_500))
    with inbox._notes.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_inbox SET received_at_ms = received_at_ms - 7200000")
    with inbox.open(ids(9_999)) as work:
        assert work.new
        assert inbox.purge(timedelta(hours=1)) == 2_500
    assert len(rows_in_inbox(inbox._notes.engine)) == 1


def test_C5_an_id_that_was_purged_and_noted_again_is_not_purged_by_another_that_found_it_old(
    inbox: Inbox,
) -> None:
    """Between its look and its delete another purge, and a late delivery, may come."""
    note(inbox, 1, 2)
    engine = inbox._notes.engine
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_inbox SET received_at_ms = 1")
    left = [1]

    def on_statement(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE") and left:
            left.clear()
            with engine.begin() as other:
                other.exec_driver_sql("DELETE FROM qmq_inbox")
            assert note(inbox, 1) == {1}

    sa.event.listen(engine, "before_cursor_execute", on_statement)
    assert inbox.purge(timedelta(hours=1)) == 0
    assert note(inbox, 1, 2) == {2}


def test_a_purge_keeps_nobody_from_noting_ids_whatever_the_applications_level_is(
    a_server_database: Database,
) -> None:
    """At SERIALIZABLE, MySQL would keep what a purge has read from changing, and from growing."""
    make_engine(a_server_database.url).dispose()
    strict = a_server_database.engine(isolation_level="SERIALIZABLE")
    impatient = a_server_database.engine()
    patience = {"mysql": "SET innodb_lock_wait_timeout = 1", "postgresql": "SET lock_timeout = 10"}
    inbox, other = Inbox(strict, group=GROUP), Inbox(impatient, group=GROUP)
    note(inbox, 10, 30)
    with strict.begin() as connection:
        connection.exec_driver_sql("UPDATE qmq_inbox SET received_at_ms = 1")
    noted: list[set[int]] = []

    @sa.event.listens_for(impatient, "begin")
    def on_begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql(patience[a_server_database.kind])

    @sa.event.listens_for(strict, "commit")
    def on_commit(_: sa.Connection) -> None:
        if not noted:
            noted.append(note(other, 5, 20, 40))

    assert inbox.purge(timedelta(hours=1)) == 2
    assert noted == [{5, 20, 40}]


#: Statements before and after the handler, BEGIN and COMMIT aside: one id, several, several with known
#: ones among them, where PostgreSQL looks whether they are there, and MySQL tries, looks which they
#: are, and tries again; and one that is known, at which both look. MySQL and MariaDB are first asked
#: whether a temporary table hides the inbox. MySQL itself, which does not tell what an INSERT has
#: stored, is asked for it once more where something was new.
COSTS = {"mariadb": [4, 4, 6, 5], "mysql": [5, 5, 7, 5], "postgresql": [2, 2, 3, 2]}


def test_what_an_inbox_adds_to_a_transaction(a_server_database: Database) -> None:
    engine = make_engine(a_server_database.url)
    inbox = Inbox(engine, group=GROUP)
    statements: list[str] = []

    def on_statement(*arguments: Any) -> None:
        statements.append(arguments[2])

    sa.event.listen(engine, "before_cursor_execute", on_statement)
    costs = []
    for numbers in ((1,), (2, 3, 4), (3, 4, 5), (5,)):
        statements.clear()
        note(inbox, *numbers)
        costs.append(len(statements))
    kind = "mariadb" if is_mariadb(engine) else a_server_database.kind
    assert costs == COSTS[kind]
    engine.dispose()


def test_a_table_that_keeps_what_was_rolled_back_is_refused(mysql_database: Database) -> None:
    engine = make_engine(mysql_database.url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE qmq_inbox ENGINE=MyISAM")
    with pytest.raises(OutboxMissingError, match=r"ALTER TABLE \w+\.qmq_inbox ENGINE=InnoDB"):
        Inbox(sessionmaker(engine), group=GROUP).check()
    engine.dispose()


def test_ids_of_other_databases_stay_apart(make_database: Callable[[str], Database]) -> None:
    """Two databases on one server have an inbox each."""
    inboxes = []
    for _ in range(2):
        database = make_database("mysql")
        make_engine(database.url).dispose()
        inboxes.append(Inbox(database.engine(), group=GROUP))
    assert [note(inbox, 1) for inbox in inboxes] == [{1}, {1}]
