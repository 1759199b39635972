"""The thread that indexes: it catches up, ends when asked, and hurts nobody when it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from qmq_broker.service import indexer as indexer_module
from qmq_broker.service.indexer import REST_WHILE_BUSY, Indexer
from qmq_broker.storage.index.key_index import IndexStep
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.frame import parse_message_frame
from tests.broker.service.rig import STORE, Rig, make_frame, new_ids

WAIT_S_MAX = 30.0
SMALL = replace(STORE, index_entries=50, segment_bytes=64 * 1024, queue_flush_bytes=20_000)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "data", store_options=SMALL)
    yield rig
    rig.close()


@contextmanager
def running(indexer: Indexer) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=indexer.run)
    thread.start()
    try:
        yield thread
    finally:
        indexer.stop()
        indexer.stop()
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()


def wait_until_indexed(store: Store) -> None:
    ends_at_s = monotonic() + WAIT_S_MAX
    pause = threading.Event()
    while store.index.indexed_offset < store.durable_offset:
        assert monotonic() < ends_at_s
        pause.wait(0.005)


def test_it_catches_up_and_continues_with_what_comes_later(rig: Rig) -> None:
    with running(Indexer(rig.store, SYSTEM_CLOCK)):
        for _ in range(3):
            rig.send(*(b"x" * 100 for _ in range(40)))
            wait_until_indexed(rig.store)
    assert len(rig.store.index.files()) == 3


def test_searches_steps_and_sends_at_once_never_miss_a_message(rig: Rig) -> None:
    ids = new_ids()
    acknowledged: list[bytes] = []
    missed: list[bytes] = []
    is_over = threading.Event()

    def search() -> None:
        while not is_over.is_set():
            for message_id in acknowledged[-30:]:
                result = rig.store.search.by_id(message_id, 10)
                if len(result.found) != 1 and result.is_complete:
                    missed.append(message_id)

    searching = threading.Thread(target=search)
    with running(Indexer(rig.store, SYSTEM_CLOCK)):
        searching.start()
        for _ in range(150):
            frame = parse_message_frame(make_frame([b"y" * 60] * 7, ids=ids))
            rig.store.append([frame])
            rig.store.commit_and_step()
            acknowledged += frame.message_ids()
        wait_until_indexed(rig.store)
        is_over.set()
        searching.join(WAIT_S_MAX)
    assert not missed
    for message_id in acknowledged:
        result = rig.store.search.by_id(message_id, 10)
        assert (len(result.found), result.is_complete) == (1, True)


def test_while_much_is_written_the_index_waits_until_it_is_far_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_module, "BUSY_BYTES_PER_S", 5_000)
    monkeypatch.setattr(indexer_module, "LAG_BYTES_MAX", 4_000)
    indexer = Indexer(rig.store, rig.clock)
    assert indexer.look()
    looks = []
    for _ in range(5):
        rig.send(b"x" * 900)
        rig.clock.pass_ms(100)
        looks.append(indexer.look())
    assert indexer.is_busy
    assert looks == [False, False, False, True, True]
    rig.clock.pass_ms(1_000)
    assert indexer.look()
    assert not indexer.is_busy


def test_between_bursts_that_follow_each_other_the_index_waits_as_within_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_module, "BUSY_BYTES_PER_S", 5_000)
    indexer = Indexer(rig.store, rig.clock)
    for _ in range(3):
        rig.send(b"x" * 900)
        rig.clock.pass_ms(2)
        assert not indexer.look()  # it is seen while it begins
        rig.clock.pass_ms(400)
        assert not indexer.look()
    rig.clock.pass_ms(600)
    assert indexer.look()


def test_a_little_that_comes_again_and_again_is_indexed_at_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer_module, "BUSY_BYTES_PER_S", 50_000)
    indexer = Indexer(rig.store, rig.clock)
    for _ in range(20):
        rig.send(b"x" * 900)
        rig.clock.pass_ms(50)
        assert indexer.look()


def test_the_rest_is_longer_while_much_is_written(rig: Rig) -> None:
    indexer = Indexer(rig.store, rig.clock)
    assert indexer._rest_s(0.01) == pytest.approx(0.01)
    indexer.is_busy = True
    assert indexer._rest_s(0.01) == pytest.approx(0.01 * REST_WHILE_BUSY)


class BrokenIndexer(Indexer):
    """Fails as no code of ours should."""

    def step(self) -> IndexStep:
        raise ZeroDivisionError


def test_a_fault_in_it_ends_this_thread_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with running(BrokenIndexer(rig.store, SYSTEM_CLOCK)) as thread:
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()
    assert "key index stopped until the next start" in caplog.text
    rig.send(b"a")


def test_a_broker_that_stops_notes_its_index(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", store_options=SMALL)
    broker = rig.broker
    for thread in broker._threads:
        thread.start()
    outcomes = rig.submit(make_frame([b"a"] * 30))
    wait_until_stored(rig, outcomes)
    wait_until_indexed(rig.store)
    assert broker.stop(WAIT_S_MAX)
    rig.start()
    rig.store.index.step(1)
    assert rig.store.index.indexed_offset == rig.store.durable_offset
    rig.close()


def wait_until_stored(rig: Rig, outcomes: Sequence[object]) -> None:
    ends_at_s = monotonic() + WAIT_S_MAX
    pause = threading.Event()
    while not outcomes:
        assert monotonic() < ends_at_s
        pause.wait(0.005)
        rig.run_posted()
