"""Ids of a process: dense, without twins between threads, another instance in every child."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

import pytest

from qmq_client.ids import (
    MESSAGE_IDS,
    TOKEN_BYTES,
    IdSource,
    Mark,
    ProcessIdMark,
    fork_mark,
    new_token,
)
from qmq_client.wire.message_id import split_message_id


def in_a_child(make: Callable[[], bytes]) -> bytes:
    """What `make` returns in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads
        child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # a child that hangs ends itself
        try:
            os.write(writing, make())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        made = answer.read()
    _, status = os.waitpid(child, 0)
    assert status == 0
    return made


def test_ids_are_dense_from_the_first() -> None:
    ids = IdSource()
    halves = [split_message_id(ids.next_id()) for _ in range(1000)]
    assert [counter for _, counter in halves] == list(range(1000))
    assert len({instance for instance, _ in halves}) == 1


def test_two_sources_have_two_instances() -> None:
    assert split_message_id(IdSource().next_id())[0] != split_message_id(IdSource().next_id())[0]


def test_S10_threads_get_no_twins_and_leave_no_gaps() -> None:
    ids = IdSource()
    made: list[list[bytes]] = [[] for _ in range(8)]
    ready = threading.Barrier(8)

    def make(mine: list[bytes]) -> None:
        ready.wait(60)
        mine.extend(ids.next_id() for _ in range(2000))

    threads = [threading.Thread(target=make, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counters = sorted(split_message_id(each)[1] for mine in made for each in mine)
    assert counters == list(range(16_000))
    assert all(mine == sorted(mine) for mine in made)


def test_S10_a_forked_child_has_another_instance_and_the_parent_keeps_its_own() -> None:
    before = split_message_id(MESSAGE_IDS.next_id())
    children = [split_message_id(in_a_child(MESSAGE_IDS.next_id)) for _ in range(2)]
    after = split_message_id(MESSAGE_IDS.next_id())
    assert after == (before[0], before[1] + 1)
    assert len({before[0], *(instance for instance, _ in children)}) == 3
    assert [counter for _, counter in children] == [0, 0]


def test_S10_a_child_that_carries_its_parents_process_id_has_another_instance() -> None:
    before, process_id = split_message_id(MESSAGE_IDS.next_id()), os.getpid()

    def make() -> bytes:
        os.getpid = lambda: process_id  # as a namespace would
        return MESSAGE_IDS.next_id()

    assert split_message_id(in_a_child(make))[0] != before[0]


@pytest.mark.parametrize("mark", [fork_mark, ProcessIdMark])
def test_S10_a_child_of_a_server_that_calls_no_fork_hooks_has_another_instance(
    mark: Callable[[], Mark],
) -> None:
    ids = IdSource()  # nobody renews it after a fork, as under uWSGI
    ids._mark = mark()
    before = split_message_id(ids.next_id())
    assert split_message_id(in_a_child(ids.next_id))[0] != before[0]
    assert split_message_id(ids.next_id()) == (before[0], before[1] + 1)
    ids.renew_in_child()
    assert split_message_id(ids.next_id())[0] != before[0]


def test_an_id_takes_no_system_call_where_memory_can_be_wiped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, process_id = IdSource(), os.getpid()
    ids.next_id()
    asked: list[str] = []

    def getpid() -> int:
        asked.append("getpid")
        return process_id

    monkeypatch.setattr(os, "getpid", getpid)
    ids.next_id()
    assert asked == ([] if sys.platform == "linux" else ["getpid"])


def test_tokens_are_random_and_sixteen_bytes() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {TOKEN_BYTES}
