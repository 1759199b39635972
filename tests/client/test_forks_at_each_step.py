"""A fork while another thread is at each step of a send, a commit, a flush or a first decoding.

The child has a copy of every lock as it was, and not the thread that would give it back. It must be able
to send, commit and flush all the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

import qmq_client
from qmq_client import typed
from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.typed import json_as
from qmq_client.wire.frame import read_header
from qmq_client.wire.requests import SendAnswer
from tests.client.outbox.test_interrupted_databases import fail, is_done_in_time
from tests.client.world import SUBJECT, open_engine
from tests.kit.forked import CHILD_S, code_of, forked
from tests.kit.interrupting import Interruption, at_each_look

DEADLINE_S: Final = 60.0
PLACES: Final = ("ids.py", "producer.py", "signal_flag.py", "outbox", "publishing")
WITHIN: Final = (
    *(str(Path(qmq_client.__file__).with_name(name)) for name in PLACES),
    threading.__file__,
)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Acceptor:
    """Accepts everything, without a lock that a child would inherit."""

    def send(self, frame: bytes) -> SendAnswer:
        header = read_header(frame)
        return SendAnswer(
            frame_crc=header.body_crc,
            count=header.record_count,
            duplicates=0,
            physical_offset=0,
            stored_at_ms=0,
            durability="none",
        )

    def pull(self, request: Any) -> Any:
        raise AssertionError("a producer does not pull")

    settle = pull

    def close(self) -> None:
        """There is nothing to close."""


def run(interruption: Interruption, work: Callable[[], object], reached: threading.Event) -> None:
    interruption.around(work)
    reached.set()  # also the end of the work


def failures_at_each_look(
    make_work: Callable[[], Callable[[], object]],
    in_child: Callable[[], bool],
    within: Sequence[str],
    *,
    is_waited_for: bool,
) -> tuple[int, list[str]]:
    """How many children were forked, and where another thread stood when one failed.

    If a fork waits for the work, the thread goes on as it begins. Otherwise it stands until there is a
    child: were it the application inside SQLite, a child could hang.
    """
    count, failures = 0, []
    reached, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        reached.set()
        assert go_on.wait(DEADLINE_S)

    for interruption in at_each_look(stand, within=within):
        reached.clear()
        go_on.clear()
        other = threading.Thread(target=run, args=(interruption, make_work(), reached))
        other.start()
        assert reached.wait(DEADLINE_S)
        if is_waited_for:
            go_on.set()  # it needs the interpreter for its next step, and the fork is as near
        code = code_of(forked(in_child))
        go_on.set()
        if code:
            failures.append(f"{interruption.place}: {code}")
        count += 1
        other.join(DEADLINE_S)
    return count, failures


@pytest.fixture(params=[True, False], ids=["with a publisher", "alone"])
def producer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Producer]:
    """With a publisher at work beside the other thread, or without a thread of its own.

    Children do not wait for the database, which others may have locked.
    """
    # Without a pool, whose lock the other thread would have at some steps: a fork closes what is idle in it.
    engine = open_engine(
        tmp_path / "shop.sqlite", poolclass=sa.NullPool, connect_args={"timeout": DEADLINE_S}
    )
    parent = os.getpid()

    @sa.event.listens_for(engine, "connect")
    def set_patience(driver: Any, _: Any) -> None:
        if os.getpid() != parent:
            driver.execute("PRAGMA busy_timeout = 0")

    create_tables(engine)
    options = ProducerOptions(background=request.param, delete_delay_ms=0)
    with Producer(engine, Acceptor(), options=options) as made:
        yield made
    engine.dispose()


def send(producer: Producer) -> None:
    with Session(producer.engine) as session, session.begin():
        producer.send(Message(SUBJECT, "a"), session=session)


def sends(producer: Producer) -> bool:
    """What each child does."""
    with suppress(sa.exc.OperationalError):
        send(producer)
    return producer.flush(CHILD_S).is_done


def test_S10_a_fork_at_each_step_of_another_threads_transaction(producer: Producer) -> None:
    def make_work() -> Callable[[], object]:
        assert producer.flush(DEADLINE_S)  # or the publisher waits for the thread that stands
        return partial(send, producer)

    count, failures = failures_at_each_look(
        make_work, partial(sends, producer), WITHIN, is_waited_for=False
    )
    assert failures == []
    assert count > 100


def test_S10_a_fork_at_each_step_of_another_threads_flush(producer: Producer) -> None:
    def make_work() -> Callable[[], object]:
        send(producer)
        return producer.flush

    count, failures = failures_at_each_look(
        make_work, partial(sends, producer), WITHIN, is_waited_for=True
    )
    assert failures == []
    assert count > 10


def test_S10_a_fork_while_another_thread_learns_a_type() -> None:
    bodies: list[Any] = []

    def make_work() -> Callable[[], object]:
        bodies.append(msgspec.defstruct("Body", [("number", "int")]))
        return partial(json_as, b'{"number": 1}', bodies[-1])

    def in_child() -> bool:
        other: Any = msgspec.defstruct("Other", [("number", "int")])
        return all(json_as(b'{"number": 1}', each).number for each in (bodies[-1], other))

    within = [typed.__file__, *msgspec.__path__]
    count, failures = failures_at_each_look(make_work, in_child, within, is_waited_for=True)
    assert failures == []
    assert count > 20


def test_S10_a_signal_that_raises_around_a_fork_keeps_no_thread_from_learning_a_type() -> None:
    """In any of the steps of ours that a fork makes; what is raised there, Python only reports."""

    def learn() -> bool:
        body: Any = msgspec.defstruct("Body", [("number", "int")])
        return bool(json_as(b'{"number": 1}', body).number)

    def fork_and_wait() -> None:
        assert code_of(forked(lambda: True)) == 0

    for interruption in at_each_look(fail, within=[typed.__file__]):
        with suppress(KeyboardInterrupt):
            interruption.around(fork_and_wait)
        assert is_done_in_time(learn), interruption.place
