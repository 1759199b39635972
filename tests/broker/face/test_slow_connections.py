"""Who is too slow: judged by what he sent, and not by when the broker had time to read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_broker.face.connection.listener import SweepCounts, end_slow_connections
from qmq_broker.face.connection.protocol import Connection
from qmq_broker.face.limits import FaceLimits
from tests.broker.face.asgi import Client
from tests.broker.face.wire import Wire, connect, request
from tests.broker.service.rig import Rig

LIMITS = FaceLimits()
NO_REQUEST = b"POST /v1/pull HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
NONE = SweepCounts(slow=0, unread=0)
SLOW = SweepCounts(slow=1, unread=0)
UNREAD = SweepCounts(slow=0, unread=1)
WAITING = b'{"subject":"a","group":"b","consumer":"c","wait_ms":60000}'


class Watched:
    """One connection, and the passes over it at a time that the test gives."""

    def __init__(self, client: Client) -> None:
        self.connection: Connection
        self.wire: Wire
        self.connection, self.wire = connect(client)

    def look(self, after_ms: float) -> SweepCounts:
        """A pass so long after the connection was made."""
        now_s = asyncio.get_running_loop().time() + after_ms / 1000
        return end_slow_connections([self.connection], now_s, LIMITS)


def pull_that_waits() -> bytes:
    head = request(content_length=b"%d" % len(WAITING))
    return head[: head.index(b"\r\n\r\n") + 4] + WAITING


def with_a_connection(directory: Path, story: Callable[[Watched], None]) -> None:
    """In a loop that does nothing else."""
    rig = Rig(directory)

    async def tell() -> None:
        story(Watched(Client(rig)))

    asyncio.run(tell())
    rig.close()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/pull HTTP/1.1\r\nHost:"])
def test_B10_a_connection_that_is_half_open_costs_five_seconds(tmp_path: Path, sent: bytes) -> None:
    def story(watched: Watched) -> None:
        watched.connection.data_received(sent)
        found = [watched.look(ms) for ms in range(LIMITS.sweep_ms, 5_001, LIMITS.sweep_ms)]
        assert found.index(SLOW) >= LIMITS.head_ms // LIMITS.sweep_ms
        assert watched.connection.transport.is_closing()

    with_a_connection(tmp_path, story)


def test_B10_what_came_while_the_broker_stood_still_is_read_before_anybody_is_called_slow(
    tmp_path: Path,
) -> None:
    def story(watched: Watched) -> None:
        assert watched.look(10 * LIMITS.head_ms) == NONE
        watched.connection.data_received(NO_REQUEST)  # it was there all the time
        assert watched.wire.written.startswith(b"HTTP/1.1 400")
        assert watched.look(20 * LIMITS.head_ms) == NONE

    with_a_connection(tmp_path, story)


@pytest.mark.parametrize("meanwhile", [b"", b"P", b"POST /v1/pull HTTP/1.1\r\nHost: a\r\n"])
def test_B10_who_has_not_sent_a_head_by_the_next_pass_is_slow(
    tmp_path: Path, meanwhile: bytes
) -> None:
    def story(watched: Watched) -> None:
        assert watched.look(LIMITS.head_ms + 1_000) == NONE
        if meanwhile:
            watched.connection.data_received(meanwhile)
        assert watched.look(2 * LIMITS.head_ms + 2_000) == SLOW
        assert watched.wire.written.startswith(b"HTTP/1.1 408")
        assert watched.wire.is_closed

    with_a_connection(tmp_path, story)


def test_B10_a_body_that_stands_still_in_its_own_time_has_a_pass_of_its_own(tmp_path: Path) -> None:
    def story(watched: Watched) -> None:
        assert watched.look(LIMITS.head_ms + 1_000) == NONE
        watched.connection.data_received(request(path=b"/v1/subjects")[:-1])
        assert watched.look(LIMITS.head_ms + 1_001) == NONE
        assert watched.look(LIMITS.request_ms + 1_000) == NONE
        assert watched.look(LIMITS.request_ms + 1_001) == SLOW

    with_a_connection(tmp_path, story)


def test_a_connection_that_asks_for_nothing_any_more_is_closed_and_no_other(tmp_path: Path) -> None:
    def story(watched: Watched) -> None:
        over_ms = 2 * LIMITS.idle_ms
        for _ in range(2):
            watched.connection.data_received(request())
            assert watched.look(LIMITS.idle_ms - 1_000) == NONE
            assert watched.look(LIMITS.idle_ms - 1_000) == NONE
            assert watched.look(over_ms) == NONE
            assert not watched.wire.is_closed
            # What the broker had no time to read is read between two passes.
            watched.connection.data_received(request())
            assert watched.look(LIMITS.idle_ms - 1_000) == NONE
        assert watched.look(over_ms) == NONE
        assert watched.look(over_ms) == NONE
        assert watched.wire.is_closed
        assert watched.wire.written.count(b"HTTP/1.1 ") == 4
        assert b"HTTP/1.1 408" not in watched.wire.written

    with_a_connection(tmp_path, story)


def test_a_pull_that_waits_is_no_connection_that_asks_for_nothing(tmp_path: Path) -> None:
    def story(watched: Watched) -> None:
        watched.connection.data_received(request())
        watched.connection.data_received(pull_that_waits())
        for _ in range(2):
            assert watched.look(2 * LIMITS.idle_ms) == NONE
        assert not watched.wire.is_closed

    with_a_connection(tmp_path, story)


@pytest.mark.parametrize("ending", [request(connection=b"close"), NO_REQUEST], ids=["one", "none"])
def test_B10_who_leaves_the_rest_of_a_last_answer_unread_is_left(
    tmp_path: Path, ending: bytes
) -> None:
    """A transport that is closed stays until what it holds was read: for ever, if nobody reads it."""

    def story(watched: Watched) -> None:
        watched.connection.data_received(ending)
        assert watched.wire.is_closed
        assert watched.look(0) == NONE
        assert watched.look(LIMITS.unread_ms - 1_000) == NONE
        assert watched.look(LIMITS.unread_ms + 1_000) == NONE
        assert not watched.wire.is_aborted
        assert watched.look(LIMITS.unread_ms + 1_001) == UNREAD
        assert watched.wire.is_aborted

    with_a_connection(tmp_path, story)


def test_a_request_that_has_to_wait_for_the_one_before_it_is_not_slow(tmp_path: Path) -> None:
    def story(watched: Watched) -> None:
        watched.connection.data_received(pull_that_waits() + request(path=b"/v1/subjects")[:-1])
        for _ in range(2):
            assert watched.look(2 * LIMITS.request_ms) == NONE
        assert not watched.wire.is_closed

    with_a_connection(tmp_path, story)


def test_a_request_behind_which_somebody_is_slow_is_answered_all_the_same(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    async def tell() -> None:
        watched = Watched(Client(rig))
        watched.connection.data_received(pull_that_waits() + b"POST /v1/pu")
        assert watched.look(LIMITS.head_ms + 1_000) == NONE
        assert watched.look(LIMITS.head_ms + 1_001) == SLOW
        assert not watched.wire.written
        for _ in range(2):  # once is enough
            assert watched.look(LIMITS.request_ms + 1_000) == NONE
        rig.broker.drain("the end of the test")
        while not watched.wire.is_closed:
            await asyncio.sleep(0)
        assert watched.wire.written.count(b"HTTP/1.1 ") == 1
        assert watched.wire.written.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in watched.wire.written

    asyncio.run(asyncio.wait_for(tell(), 60))
    rig.close()
