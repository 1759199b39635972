"""Engines and sessions set up in ways that could break a promise; facts E7 to E16."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as session_maker

from qmq_client.errors import AutocommitError
from qmq_client.message import Message
from qmq_client.producer import Producer
from tests.client.outbox.interference import kill, server_id
from tests.client.publishing import sweep
from tests.client.world import SUBJECT, Order, World, a_world, add
from tests.conftest import MakeDatabase
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database
from tests.services.drivers import drivers

AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}


class OtherBase(DeclarativeBase):
    """Tables of a second database."""


class Note(OtherBase):
    """A row of it."""

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.mark.parametrize("way", ["engine", "option of the engine", "connection", "execution"])
def test_F8_E7_S1_autocommit_by_any_way_is_refused(
    a_database: Database, tmp_path: Path, way: str
) -> None:
    options = AUTOCOMMIT if way == "engine" else None
    with a_world(tmp_path, database=a_database, engine_options=options) as world:
        engine = world.engine
        if way == "option of the engine":
            engine = engine.execution_options(**AUTOCOMMIT)
        with engine.connect() as connection:
            if way == "connection":
                connection.execution_options(**AUTOCOMMIT)
            with Session(connection) as session:
                if way == "execution":
                    session.connection(execution_options=AUTOCOMMIT)
                session.execute(sa.select(Order))
                with pytest.raises(AutocommitError):
                    world.send("a", session)


@pytest.mark.parametrize("is_undone", [True, False], ids=["undone", "released"])
def test_F8_S1_a_savepoint_in_autocommit_takes_the_message_along(
    tmp_path: Path, make_database: MakeDatabase, is_undone: bool
) -> None:
    """On SQLite the outermost savepoint begins a transaction, and its release commits."""
    database = make_database("sqlite")
    with (
        a_world(tmp_path, database=database, engine_options=AUTOCOMMIT) as world,
        world.engine.connect() as connection,
    ):
        savepoint = connection.begin_nested()
        connection.execute(sa.insert(Order).values(label="a"))
        world.send("a", connection)
        savepoint.rollback() if is_undone else savepoint.commit()
        connection.close()
        orders, _, left = world.outcome()
        kept = 0 if is_undone else 1  # without a hint of its commit, for the watchdog
        assert (len(orders), len(left)) == (kept, kept)


def test_S1_S11_a_rollback_given_as_text_takes_the_message_along(
    a_database: Database, tmp_path: Path
) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            await session.execute(sa.insert(Order).values(label="undone"))
            await world.send("undone", session)
            await session.execute(sa.text("ROLLBACK"))
            await session.rollback()
            await session.execute(sa.insert(Order).values(label="again"))
            await world.send("again", session)
            await session.commit()
        await world.engine.dispose()

    with a_world(tmp_path, database=a_database, is_async=True) as world:
        asyncio.run(main(world))
        assert world.outcome() == (["again"], ["again"], set())


@pytest.mark.parametrize("ending", ["ROLLBACK", "COMMIT"])
def test_F8_S1_asyncpg_after_an_end_given_as_text_commits_each_statement_and_is_refused(
    make_database: MakeDatabase, tmp_path: Path, ending: str
) -> None:
    async def main(world: World) -> None:
        async with AsyncSession(world.engine) as session:
            await session.execute(sa.insert(Order).values(label="before"))
            await world.send("before", session)
            await session.execute(sa.text(ending))
            with pytest.raises(AutocommitError, match="given as text"):
                await world.send("alone", session)
            await session.rollback()
            await session.execute(sa.insert(Order).values(label="again"))
            await world.send("again", session)
            await session.commit()
        await world.engine.dispose()

    driver = next(one for one in drivers() if str(one) == "asyncpg")
    with a_world(tmp_path, database=make_database(driver.kind), driver=driver) as world:
        asyncio.run(main(world))
        world.producer.flush()
        world.make_due()
        sweep(world)
        kept = ["before", "again"] if ending == "COMMIT" else ["again"]
        orders, sent, left = world.outcome()
        assert (sorted(orders), sorted(sent), left) == (sorted(kept), sorted(kept), set())


def test_E8_S3_a_savepoint_as_first_operation_goes_with_the_transaction(any_world: World) -> None:
    with Session(any_world.engine) as session:
        with session.begin_nested():
            add(any_world, session, "a")
        session.rollback()
    orders, _, left = any_world.outcome()
    # SQLite's driver begins later: the release of such a savepoint commits, rows and messages alike.
    kept = 1 if any_world.kind == "sqlite" else 0
    assert (len(orders), len(left)) == (
        kept,
        kept,
    )  # without a hint of its commit, for the watchdog


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
@pytest.mark.parametrize("is_outbox_cut", [False, True])
def test_F8_E9_S1_with_two_databases_a_message_goes_with_the_one_that_has_its_outbox(
    make_database: MakeDatabase, kind: str, is_outbox_cut: bool, tmp_path: Path
) -> None:
    other = make_database(kind).engine()
    OtherBase.metadata.create_all(other)
    with a_world(tmp_path, database=make_database(kind)) as world:
        for i in range(8):  # which of the two commits first is not determined
            binds: dict[Any, Any] = {Order: world.engine, Note: other}
            with Session(binds=binds) as session:
                session.execute(sa.insert(Order).values(label=f"{i}"))
                session.execute(sa.insert(Note))
                world.send(f"{i}", session)
                cut = world.engine if is_outbox_cut else other
                kill(world, session.connection(bind_arguments={"bind": cut}))
                with pytest.raises(sa.exc.DBAPIError):
                    session.commit()
        orders, sent, left = world.outcome()
        assert (sent, left) == (orders, set())
        assert not (is_outbox_cut and orders)


def test_E10_S1_S2_two_phases_commit_and_roll_back_with_their_messages(server_world: World) -> None:
    with Session(server_world.engine, twophase=True) as session:
        add(server_world, session, "a")
        session.commit()
        add(server_world, session, "b")
        session.prepare()
        session.rollback()
    assert server_world.outcome() == (["a"], ["a"], set())


@pytest.mark.parametrize("is_first", [True, False])
def test_E10_S8_a_send_between_the_two_phases_ends_in_an_error(
    server_world: World, is_first: bool
) -> None:
    """What is prepared takes no further row: MySQL refuses it, PostgreSQL the second phase behind it."""
    with server_world.engine.connect() as connection:
        prepared = connection.begin_twophase()
        if not is_first:
            server_world.send("before", connection)
        prepared.prepare()

        def go_on() -> None:
            server_world.send("between", connection)
            prepared.commit()

        with pytest.raises(sa.exc.DBAPIError):
            go_on()
        connection.invalidate()
    with suppress(Exception):  # MySQL gives up one that wrote nothing
        resolve(server_world)
    server_world.make_due()
    sweep(server_world)
    assert "between" not in server_world.outcome()[1]


def test_F8_E10_S1_S2_an_orphan_prepared_transaction_hides_its_message_until_it_is_resolved(
    server_world: World,
) -> None:
    world = server_world
    with Session(world.engine, twophase=True) as session:
        add(world, session, "a")
        connection = session.connection()
        session.prepare()
        kill(world, connection)
        session.invalidate()
    try:
        assert world.outcome() == ([], [], set())
        assert sweep(world).sent == ()
    finally:
        resolve(world)  # nobody could drop the database otherwise
    world.make_due()
    assert len(sweep(world).sent) == 1
    assert world.outcome() == (["a"], ["a"], set())


def resolve(world: World) -> None:
    """Commit every prepared transaction, as a person would."""
    commits = []
    if world.kind == "postgresql":
        found = world.read("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        commits = [f"COMMIT PREPARED '{gid}'" for (gid,) in found]
    else:
        for _, length, _, data in world.read("XA RECOVER"):
            text = data if isinstance(data, str) else data.decode()
            commits.append(f"XA COMMIT '{text[:length]}'")
    assert commits
    connection = world.truth.connect()
    if world.kind == "postgresql":
        connection.autocommit = True
    else:
        connection.autocommit(True)
    for statement in commits:
        connection.cursor().execute(statement)
    connection.close()


def test_E11_S4_a_scoped_session_removed_without_a_commit_leaves_nothing(any_world: World) -> None:
    registry = scoped_session(session_maker(any_world.engine))
    add(any_world, registry, "a")
    registry.remove()
    add(any_world, registry, "b")
    registry.commit()
    registry.remove()
    assert any_world.outcome() == (["b"], ["b"], set())


def test_S4_a_session_of_flask_sqlalchemy_belongs_to_its_request(
    a_database: Database, tmp_path: Path
) -> None:
    flask = pytest.importorskip("flask")
    module = pytest.importorskip("flask_sqlalchemy")
    with a_world(tmp_path, database=a_database) as world:
        app = flask.Flask("shop")
        app.config["SQLALCHEMY_DATABASE_URI"] = world.url
        db = module.SQLAlchemy(app)
        with app.app_context():
            engine = db.engine
            world.engine = engine
        producer = world.make_producer()
        for label, is_committed in (("lost", False), ("a", True), ("lost", False), ("b", True)):
            with app.app_context():
                db.session.execute(sa.insert(Order).values(label=label))
                producer.send(Message(SUBJECT, label), session=db.session)
                if is_committed:
                    db.session.commit()
        assert producer.flush()
        producer.close()
        engine.dispose()
        assert world.outcome() == (["a", "b"], ["a", "b"], set())


def test_S8_outside_an_application_context_flask_refuses_the_send_and_nothing_is_written(
    world: World,
) -> None:
    flask = pytest.importorskip("flask")
    module = pytest.importorskip("flask_sqlalchemy")
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = world.url
    db = module.SQLAlchemy(app)
    producer = Producer(world.engine, world.transport, session=db.session)
    with pytest.raises(RuntimeError, match="outside of application context"):
        producer.send(Message(SUBJECT, "a"))
    assert producer.flush()
    producer.close()
    assert world.outcome() == ([], [], set())


@pytest.fixture
def narrow_world(a_database: Database, tmp_path: Path) -> Iterator[World]:
    """An engine with one connection for everybody."""
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": DEADLINE_S}
    with a_world(tmp_path, database=a_database, engine_options=options, background=True) as world:
        yield world


def test_F9_E15_S5_one_connection_for_four_threads_is_enough(narrow_world: World) -> None:
    world = narrow_world

    def work(name: int) -> None:
        for i in range(10):
            with Session(world.engine) as session, session.begin():
                session.connection(execution_options={"qmq_begin": "write"})
                add(world, session, f"{name}.{i}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert world.producer.flush(DEADLINE_S)
    orders = world.committed_orders()
    assert (len(orders), set(world.sent()), world.stored_ids()) == (40, orders, set())
    assert world.checked_out() == 0


def test_S11_no_statement_of_the_publisher_runs_on_the_thread_of_the_loop(
    a_database: Database, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"database": a_database, "is_async": True, "background": True}
    with a_world(tmp_path, **options) as world:
        threads: set[int] = set()
        sibling = world.producer._store._own.engine
        sa.event.listen(
            sibling, "before_cursor_execute", lambda *_: threads.add(threading.get_ident())
        )

        async def main() -> None:
            async with AsyncSession(world.engine) as session:
                world.send("a", session)
                await session.execute(sa.insert(Order).values(label="a"))
                await session.commit()
            await asyncio.to_thread(world.producer.flush, DEADLINE_S)
            await world.engine.dispose()

        asyncio.run(main())
        assert world.outcome() == (["a"], ["a"], set())
        assert threads
        assert threading.get_ident() not in threads


def test_F10_E14_S10_a_forked_child_shares_no_connection_and_both_send(
    server_world: World,
) -> None:
    world = server_world

    def send(label: str) -> int:
        with Session(world.engine) as session, session.begin():
            add(world, session, label)
            return server_id(session.connection().connection.driver_connection)

    parents = send("parent before")
    assert world.producer.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            number = send("child")
            assert world.producer.flush()
            os.write(writer, f"{number} {' '.join(world.sent())}".encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    childs, told = os.read(reader, 1000).decode().split(" ", 1)
    assert int(childs) != parents
    assert told == "parent before child"  # the broker in its memory is a copy
    assert send("parent after") == parents
    orders, sent, left = world.outcome()
    assert orders == ["child", "parent after", "parent before"]
    assert (sent, left) == (["parent after", "parent before"], set())
