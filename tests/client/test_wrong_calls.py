"""Calls that cannot work: each is refused at once, and says what was given where, and what to give."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session, sessionmaker

from qmq_client import (
    ConfigurationError,
    Consumers,
    InvalidMessageError,
    Message,
    Producer,
    consumer,
    create_tables,
    create_tables_async,
    make_tables,
    transaction,
    transactional,
)
from qmq_client.testing import MemoryBroker, MemoryTransport, RecordingProducer
from tests.client.world import SUBJECT, World, a_world

Call = Callable[[World, Any], object]

THINGS: Final[tuple[Any, ...]] = (
    None,
    1,
    "x",
    b"x",
    [],
    {},
    object(),
    len,
    Message,
    Message(SUBJECT),
    sa,
)
#: Where None stands for the default.
BUT_NONE: Final = THINGS[1:]
NO_NUMBERS: Final[tuple[Any, ...]] = (None, "1", object(), [], timedelta(seconds=1), float("nan"))


def transport() -> MemoryTransport:
    return MemoryTransport(MemoryBroker())


def a_receipt(world: World) -> Any:
    with Session(world.engine) as session:
        return world.producer.receipt(world.send("a", session), session=session)


@consumer(SUBJECT, group="g")
def handle(_: Message) -> None:
    """Is never called."""


#: What is called, with what, and what the error must name.
CALLS: Final[dict[str, tuple[Call, tuple[Any, ...], str]]] = {
    "engine": (lambda _, given: Producer(given, transport()), THINGS, "Producer(engine)"),
    "broker": (lambda world, given: Producer(world.engine, given), THINGS, "broker"),
    "options": (
        lambda world, given: Producer(world.engine, transport(), options=given),
        BUT_NONE,
        "Producer(options=…)",
    ),
    "tables": (
        lambda world, given: Producer(world.engine, transport(), tables=given),
        BUT_NONE,
        "tables",
    ),
    "clock": (
        lambda world, given: Producer(world.engine, transport(), clock=given),
        BUT_NONE,
        "Producer(clock=…)",
    ),
    "asked": (
        lambda world, given: Producer(world.engine, transport(), session=given),
        (1, "x", [], object(), Message(SUBJECT), sa),
        "Producer(session=…)",
    ),
    "answer": (
        lambda world, given: Producer(world.engine, transport(), session=lambda: given).send(
            Message(SUBJECT)
        ),
        THINGS,
        "session",
    ),
    "send": (
        lambda world, given: world.producer.send(Message(SUBJECT), session=given),
        (*BUT_NONE, Session, sessionmaker()),
        "session",
    ),
    "cancel": (
        lambda world, given: world.producer.cancel("0" * 32, session=given),
        BUT_NONE,
        "session",
    ),
    "cancel_async": (
        lambda world, given: asyncio.run(world.producer.cancel_async("0" * 32, session=given)),
        BUT_NONE,
        "session",
    ),
    "cancel_async, not asynchronous": (
        lambda world, given: asyncio.run(world.producer.cancel_async("0" * 32, session=given)),
        (Session(sa.create_engine("sqlite://")),),
        "cancel_async",
    ),
    "receipt": (
        lambda world, given: world.producer.receipt("0" * 32, session=given),
        BUT_NONE,
        "session",
    ),
    "flush": (lambda world, given: world.producer.flush(given), NO_NUMBERS, "deadline_s of flush"),
    "flush_async": (
        lambda world, given: asyncio.run(world.producer.flush_async(given)),
        NO_NUMBERS,
        "deadline_s of flush",
    ),
    "close": (lambda world, given: world.producer.close(given), NO_NUMBERS, "deadline_s of close"),
    "wait": (
        lambda world, given: a_receipt(world).wait(given),
        NO_NUMBERS,
        "deadline_s of receipt.wait",
    ),
    "stop": (
        lambda _, given: Consumers([handle], transport()).stop(given),
        NO_NUMBERS,
        "deadline_s of stop",
    ),
    "run": (
        lambda _, given: Consumers([handle], transport()).run(stop_deadline_s=given),
        NO_NUMBERS,
        "stop_deadline_s of run",
    ),
    "transactional": (lambda _, given: transactional(given), THINGS, "@transactional"),
    "decorated": (
        lambda world, given: transactional(world.producer)(given),
        (None, 1, "x", [], object(), Message(SUBJECT), sa),
        "@transactional",
    ),
    "transaction": (lambda _, given: transaction(given), THINGS, "transaction(engine)"),
    "create_tables": (lambda _, given: create_tables(given), THINGS, "engine of create_tables"),
    "created": (lambda world, given: create_tables(world.engine, given), BUT_NONE, "tables"),
    "create_tables_async": (
        lambda world, given: asyncio.run(create_tables_async(given or world.engine)),
        THINGS,
        "engine of create_tables_async",
    ),
    "make_tables": (lambda _, given: make_tables(given), THINGS, "metadata of make_tables"),
    "prefix": (
        lambda _, given: make_tables(sa.MetaData(), prefix=given),
        (None, 1, b"x", [], object(), sa),
        "prefix of make_tables",
    ),
    "schema": (
        lambda _, given: make_tables(sa.MetaData(), schema=given),
        (1, b"x", [], object(), sa),
        "schema of make_tables",
    ),
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


@pytest.mark.parametrize("name", CALLS)
def test_S7_a_call_with_something_else_names_argument_value_and_remedy(
    world: World, name: str
) -> None:
    call, all_given, setting = CALLS[name]
    for given in all_given:
        with pytest.raises(ConfigurationError) as error:
            call(world, given)
        assert setting in error.value.setting
        assert error.value.value
        assert error.value.remedy
    assert world.stored_ids() == set()


@pytest.mark.parametrize("name", ["send_many", "send_now_many"])
@pytest.mark.parametrize(
    "given", [None, 1, object(), Message(SUBJECT)], ids=lambda given: type(given).__name__
)
def test_S7_messages_that_are_no_list_are_refused_by_name(
    world: World, name: str, given: Any
) -> None:
    with Session(world.engine) as session:
        more = {"session": session} if name == "send_many" else {}
        with pytest.raises(InvalidMessageError) as error:
            getattr(world.producer, name)(given, **more)
    assert (error.value.field, error.value.value) == ("messages", type(given).__name__)
    assert "list" in error.value.remedy


def test_messages_may_come_from_anything_that_gives_them(world: World) -> None:
    with RecordingProducer(world.engine) as double:
        for producer in (world.producer, double):
            with Session(world.engine) as session, session.begin():
                messages: Any = (Message(SUBJECT, body) for body in "ab")
                ids = producer.send_many(messages, session=session)
            assert len(ids) == 2
        assert [message.body for message in double.sent()] == ["a", "b"]


@pytest.mark.parametrize("deadline_s", [float("inf"), 10**20, -1, 0, True])
def test_a_deadline_may_be_any_number(world: World, deadline_s: float) -> None:
    world.producer.flush(deadline_s)
    with Producer(world.engine, transport()) as producer:
        producer.send_now(Message(SUBJECT))
        producer.flush(deadline_s)
        producer.close(deadline_s)
