"""The rights that the page about migrations lists are enough, for users that have nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from qmq_client import (
    Consumers,
    Delivery,
    Inbox,
    Message,
    Producer,
    ProducerOptions,
    SendOutcome,
    consumer,
)
from qmq_client.commands.root import root
from qmq_client.errors import OutboxMissingError, QmqError
from qmq_client.outbox.checking.rights import ROLES
from qmq_client.outbox.committed.store import OutboxStore
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.testing import MemoryBroker, MemoryTransport, drain
from qmq_migrations.upgrade import migrate
from qmq_watchdog.databases import Database as Ward
from qmq_watchdog.sweep import Sweep
from qmq_watchdog.sweep_job import maintain
from tests.conftest import MakeServer
from tests.services.private import PrivateServer
from tests.tidy.house import ROOT
from tests.watchdog.rows import make_due, put_rows

PAGE = (ROOT / "docs" / "migrations.md").read_text(encoding="utf-8")
SERVERS = ("mysql", "postgresql")
PURGES = "consumer that purges its inbox or nacks within a batch"
#: A test that waits for a broker in memory fails after this long.
WAIT_S = 60.0
#: What a counter of PostgreSQL needs, as the page says it.
SEQUENCE = "GRANT USAGE ON SEQUENCE qmq_outbox_id_seq TO {user}"


def listed() -> dict[str, dict[str, str]]:
    """For each role of the page's table: rights by table."""
    table = PAGE.partition("| user |")[2].partition("\n\n")[0]
    head, _, *rows = [[cell.strip() for cell in row.split("|")] for row in table.splitlines()]
    names = [name.strip("`") for name in head[:-1] if name]
    return {
        row[1]: {
            name: rights for name, rights in zip(names, row[2:-1], strict=True) if rights != "–"
        }
        for row in rows
    }


RIGHTS = listed()


@contextmanager
def a_user(
    server: PrivateServer, kind: str, role: str, *, without: str = ""
) -> Iterator[sa.Engine]:
    """A user who has the rights of this role, but none on the table `without`; and his engine."""
    administrator = sa.create_engine(
        server.url("shop"), isolation_level="AUTOCOMMIT", poolclass=NullPool
    )
    user = "modest" if kind == "postgresql" else "modest@'%%'"
    with administrator.connect() as connection:
        if kind == "postgresql":
            connection.exec_driver_sql("CREATE ROLE modest LOGIN")
        else:
            connection.exec_driver_sql(f"CREATE USER {user}")
        for table, rights in RIGHTS[role].items():
            if table != without:
                connection.exec_driver_sql(f"GRANT {rights} ON {table} TO {user}")
        if kind == "postgresql" and role.startswith("producer"):
            assert SEQUENCE.format(user="shop") in PAGE
            connection.exec_driver_sql(SEQUENCE.format(user=user))
        engine = sa.create_engine(administrator.url.set(username="modest", password=None))
        yield engine
        engine.dispose()
    administrator.dispose()


@pytest.fixture(params=SERVERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(make_private_server: MakeServer, kind: str) -> PrivateServer:
    """With a database that `qmq db migrate` has filled."""
    made = make_private_server(kind)
    administrator = sa.create_engine(made.url(), isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with administrator.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE shop")
    engine = sa.create_engine(made.url("shop"), poolclass=NullPool)
    migrate(engine)
    return made


def run_as_owner(server: PrivateServer, *statements: str) -> None:
    """In the shop's database."""
    owner = sa.create_engine(server.url("shop"), isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with owner.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement.replace("%", "%%"))


def let_go(server: PrivateServer, kind: str) -> None:
    """So that another one may take the name."""
    if kind == "postgresql":
        run_as_owner(server, "DROP OWNED BY modest", "DROP ROLE modest")
    else:
        run_as_owner(server, "DROP USER modest@'%'")


def note_an_old_id(server: PrivateServer) -> None:
    """What was handled in 1970."""
    engine = sa.create_engine(server.url("shop"), poolclass=NullPool)
    with engine.begin() as connection:
        old = {"consumer_group": "shipping", "message_id": b"handled long ago", "received_at_ms": 1}
        connection.execute(sa.insert(DEFAULT_TABLES.inbox), old)


def send_cancel_and_know(producer: Producer, engine: sa.Engine) -> None:
    """One message that arrives and one that is taken back."""
    with Session(engine) as session, session.begin():
        sent = producer.send(Message("order.placed", "1", key="17"), session=session)
        receipt = producer.receipt(sent, session=session)
        taken = producer.send(Message("order.placed", "2"), session=session)
        assert producer.cancel(taken, session=session)
    assert receipt.wait(WAIT_S) is SendOutcome.ACCEPTED
    producer.close()
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM qmq_outbox")) == 0


def test_a_producer_needs_no_more_than_the_page_says(server: PrivateServer, kind: str) -> None:
    with a_user(server, kind, "producer") as engine:
        producer = Producer(engine, MemoryTransport(MemoryBroker()))
        send_cancel_and_know(producer, engine)


def test_a_producer_that_keeps_order_needs_no_more_than_the_page_says(
    server: PrivateServer, kind: str
) -> None:
    with a_user(server, kind, "producer with `order_by_key`") as engine:
        options = ProducerOptions(order_by_key=True)
        producer = Producer(engine, MemoryTransport(MemoryBroker()), options=options)
        send_cancel_and_know(producer, engine)


def test_a_consumer_with_an_inbox_needs_no_more_than_the_page_says(
    server: PrivateServer, kind: str
) -> None:
    with a_user(server, kind, "consumer with an inbox") as engine:
        broker, handled = MemoryBroker(), []

        @consumer("order.placed", group="shipping", inbox=sessionmaker(engine), batch_size=2)
        def ship(messages: list[Message], session: Session) -> None:
            handled.extend([message.body for message in messages])

        twice = Message("order.placed", 1, message_id="0" * 31 + "1")
        broker.put(twice, Message("order.placed", 2))
        consumers = Consumers(ship, MemoryTransport(broker))
        for member in consumers.members:
            member.check()
        drain(consumers)
        assert handled == [1, 2]
        with Inbox(engine, group="shipping").open([bytes(15) + b"\1"]) as work:
            assert work.new == set()


def test_a_consumer_that_purges_needs_no_more_than_the_page_says(
    server: PrivateServer, kind: str
) -> None:
    with a_user(server, kind, PURGES) as engine:
        note_an_old_id(server)
        assert Inbox(engine, group="shipping").purge(timedelta(hours=1)) == 1


def test_a_consumer_that_gives_back_part_of_a_batch_needs_no_more_than_the_page_says(
    server: PrivateServer, kind: str
) -> None:
    with a_user(server, kind, PURGES) as engine:
        broker = MemoryBroker()

        @consumer("order.placed", group="shipping", inbox=sessionmaker(engine), batch_size=3)
        def ship(deliveries: list[Delivery], session: Session) -> None:
            deliveries[1].nack(after=3_600)
            deliveries[2].reject("never")

        broker.put(*[Message("order.placed", number) for number in range(3)])
        drain(Consumers(ship, MemoryTransport(broker)))
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM qmq_inbox")) == 1


def test_a_watchdog_needs_no_more_than_the_page_says(server: PrivateServer, kind: str) -> None:
    whole = sa.create_engine(server.url("shop"))
    owner = Ward(name="shop", store=OutboxStore(whole), engine=whole)
    note_an_old_id(server)
    for role, keep_inbox_ms, purged in (
        ("watchdog", None, 0),
        ("watchdog with `keep_inbox_s`", 1, 1),
    ):
        make_due(owner, put_rows(owner, 3))
        with a_user(server, kind, role) as engine:
            ward = Ward(
                name="shop",
                store=OutboxStore(engine),
                engine=engine,
                keep_sent_ms=1,
                keep_inbox_ms=keep_inbox_ms,
            )
            assert Sweep(ward, MemoryTransport(MemoryBroker())).step().sent == 3
            assert maintain(ward).inbox_purged == purged
            ward.close()
        let_go(server, kind)
    owner.close()


@pytest.mark.parametrize(
    ("role", "table", "right"),
    [
        ("watchdog", "qmq_outbox", "UPDATE"),
        ("watchdog", "qmq_outbox", "DELETE"),
        ("watchdog with `keep_inbox_s`", "qmq_inbox", "DELETE"),
    ],
)
def test_O1_W7_a_watchdog_with_a_right_less_is_refused_with_the_grant_while_nothing_is_due(
    server: PrivateServer, kind: str, role: str, table: str, right: str, tmp_path: Path
) -> None:
    with a_user(server, kind, role) as engine:
        user = "modest" if kind == "postgresql" else "'modest'@'%'"
        run_as_owner(server, f"REVOKE {right} ON {table} FROM {user}")
        keep_inbox_s = 1 if "inbox" in role else 0
        config = tmp_path / "qmq.toml"
        config.write_text(
            f'[[database]]\nname = "shop"\nurl = "{engine.url.render_as_string()}"\n'
            f"keep_inbox_s = {keep_inbox_s}\n"
        )
        call = ["watchdog", "sweep", "--config", str(config), "--broker", "http://127.0.0.1:1"]
        refused = CliRunner().invoke(root, call)
        grant = f"GRANT {right} ON {table} TO {user}"
        assert grant in refused.output
        assert refused.exit_code == 2
        run_as_owner(server, grant)
        assert CliRunner().invoke(root, call).exit_code == 0


@pytest.mark.parametrize("right", ["SELECT", "INSERT", "SELECT, INSERT"])
def test_a_consumer_with_a_right_less_is_refused_with_the_grant_before_it_starts(
    server: PrivateServer, kind: str, right: str
) -> None:
    with a_user(server, kind, "consumer with an inbox") as engine:
        user = "modest" if kind == "postgresql" else "'modest'@'%'"
        # Who has no right at all in a database of MySQL may not enter it.
        run_as_owner(server, f"GRANT SELECT ON qmq_version TO {user}")
        run_as_owner(server, f"REVOKE {right} ON qmq_inbox FROM {user}")
        inbox = Inbox(engine, group="shipping")
        with pytest.raises(OutboxMissingError) as refused:
            inbox.check()
        grant = f"GRANT {right} ON {engine.dialect.default_schema_name}.qmq_inbox TO {user}"
        assert f"a consumer with an inbox needs: {grant}, in " in str(refused.value)
        assert "missing" not in str(refused.value), "it is there"
        run_as_owner(server, grant)
        inbox.check()


@pytest.mark.parametrize("kind", ["mysql"], indirect=True)
def test_a_producer_that_sees_no_outbox_is_told_of_its_rights_and_of_no_migration(
    server: PrivateServer, kind: str
) -> None:
    """PostgreSQL shows everybody which tables there are; there the first send fails."""
    with a_user(server, kind, "producer with `order_by_key`", without="qmq_outbox") as engine:
        options = ProducerOptions(order_by_key=True)
        producer = Producer(engine, MemoryTransport(MemoryBroker()), options=options)
        with pytest.raises(OutboxMissingError) as refused:
            producer.send_now(Message("order.placed", 1))
        assert "GRANT SELECT, INSERT, UPDATE, DELETE ON shop.qmq_outbox TO 'modest'@'%'" in (
            str(refused.value)
        )
        assert "migrate" not in str(refused.value)


def test_the_page_and_the_doctor_know_the_same_users() -> None:
    def of_ours(rights: dict[str, str]) -> dict[str, str]:
        return {table: names for table, names in rights.items() if table != "qmq_version"}

    known = {
        role.name: {
            f"qmq_{table}": ", ".join(names)
            for table in ("outbox", "inbox", "order_lock")
            if (names := getattr(role, table))
        }
        for role in ROLES
    }
    assert known == {role: of_ours(rights) for role, rights in RIGHTS.items()}


def test_a_right_less_is_too_little(server: PrivateServer, kind: str) -> None:
    with a_user(server, kind, "producer", without="qmq_outbox") as engine:
        with (
            pytest.raises((QmqError, sa.exc.DBAPIError)) as refused,
            Producer(engine, MemoryTransport(MemoryBroker())) as producer,
        ):
            producer.send_now(Message("order.placed", "1"))
        assert re.search("qmq_outbox", str(refused.value))
