"""Old segments go, but never past a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest

from qmq_broker.errors import CorruptionError, PoisonedError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.background import Work, at_once, in_a_thread
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_broker.storage.queues.queue_table import read_queue_tables, write_queue_table
from qmq_client.wire.requests import Settlement, SettleRequest
from qmq_client.wire.start import Start, StartKind
from tests.broker.service.retaining import (
    BODY,
    HOUR_MS,
    LONG_MS,
    RETAINING,
    files,
    first_sequence,
    keep_house,
    send,
    with_options,
)
from tests.broker.service.rig import GROUP, SUBJECT, Rig
from tests.kit.waiting import DEADLINE_S


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, store_options=RETAINING)
    yield made
    made.close()


def test_B12_a_segment_goes_when_it_is_old_and_every_group_has_passed_it(rig: Rig) -> None:
    send(rig, 12)
    fast = rig.pull(max_messages=20, group="fast", lease_ms=LONG_MS)
    slow = rig.pull(max_messages=20, group="slow", lease_ms=LONG_MS)
    assert keep_house(rig, ms=1_000) == 0, "nothing is old yet"
    assert keep_house(rig) == 0, "both groups hold the first message"
    for given, group in ((fast, "fast"), (slow, "slow")):
        assert rig.store.first_offset == 0
        settle(rig, group, given.ack())
    assert keep_house(rig) > 0
    assert first_sequence(rig) > 0
    assert files(rig, "commitlog")[0] != "0" * 20


def settle(rig: Rig, group: str, settlement: Settlement) -> None:
    request = SettleRequest(
        subject=SUBJECT,
        group=group,
        consumer="one",
        settlements=(settlement,),
    )
    assert rig.broker.delivery.settle(request, rig.now_ms).settled


def test_B12_what_nobody_consumes_goes_by_age_alone(rig: Rig) -> None:
    send(rig, 12)
    assert keep_house(rig) > 0


def test_B12_a_group_that_has_not_begun_with_the_last_messages_keeps_them_all(rig: Rig) -> None:
    send(rig, 3)
    rig.settle(rig.pull(max_messages=3).ack())
    send(rig, 12)
    kept = keep_house(rig)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    assert queue.entries(3, 1)[0].physical_offset >= kept
    assert rig.pull(max_messages=1).sequences == [3]


def test_B12_a_dead_letter_holds_its_message_back_until_its_time_is_over(rig: Rig) -> None:
    send(rig, 1)
    rig.settle(rig.pull().reject("bad"))
    send(rig, 12)
    rig.settle(rig.pull(max_messages=20, lease_ms=LONG_MS).ack())
    assert keep_house(rig) == 0
    assert keep_house(rig, ms=8 * 24 * HOUR_MS) > 0


def test_a_log_that_is_too_long_loses_its_oldest_segments(rig: Rig) -> None:
    with_options(rig, retain_ms=1000 * HOUR_MS, retain_bytes=3 * 2048)
    send(rig, 30)
    rig.settle(rig.pull(max_messages=30).ack())
    first_offset = keep_house(rig, ms=1_000)
    assert rig.store.written_offset - first_offset <= 4 * 2048
    assert first_offset > 0


def test_B12_by_force_a_group_loses_messages_and_their_number_is_reported(rig: Rig) -> None:
    with_options(rig, force_retention=True)
    send(rig, 5)
    assert len(rig.pull(max_messages=2).bodies) == 2
    send(rig, 10)
    assert keep_house(rig) > 0
    lost = first_sequence(rig)
    given = rig.pull(max_messages=3, consumer="two")
    assert given.sequences == [lost, lost + 1, lost + 2]
    (status,) = rig.broker.query.groups()
    # The two that were handed out came back by their lease, and are lost like the others.
    assert status.lost == lost
    rig.restart()
    (status,) = rig.broker.query.groups()
    assert status.lost == lost


def test_C7_what_goes_by_force_while_it_is_handled_holds_its_key_until_its_outcome(
    rig: Rig,
) -> None:
    with_options(rig, force_retention=True)
    rig.send(BODY, key="b")
    rig.send(BODY, key="a")
    given_back = rig.pull(max_messages=1, ordered=True)
    handled = rig.pull("two", ordered=True, lease_ms=LONG_MS)
    rig.settle(given_back.nack(delay_ms=0))
    send(rig, 10)
    last = rig.send(BODY, key="a").places[0].first_sequence
    assert keep_house(rig) > 0
    assert 1 < first_sequence(rig) <= last
    others = rig.pull(max_messages=20, ordered=True)
    assert others.sequences == list(range(first_sequence(rig), last))
    rig.settle(handled.ack(), "two")
    assert rig.pull(ordered=True).sequences == [last]


@pytest.mark.parametrize("start", [StartKind.EARLIEST, StartKind.LATEST])
def test_B12_what_a_group_lost_by_force_is_counted_before_it_is_moved(
    rig: Rig, start: StartKind
) -> None:
    with_options(rig, force_retention=True)
    send(rig, 5)
    rig.settle(rig.pull(max_messages=2).ack())
    send(rig, 10)
    assert keep_house(rig) > 0
    lost = first_sequence(rig) - 2
    assert lost > 0
    rig.broker.changes.seek(SUBJECT, GROUP, Start(start), rig.now_ms)
    for _ in range(2):
        (status,) = rig.broker.query.groups()
        assert status.lost == lost
        rig.restart()


def test_B8_a_subject_that_lost_all_its_messages_continues_where_it_was(rig: Rig) -> None:
    send(rig, 2, subject="quiet")
    send(rig, 12)
    assert keep_house(rig) > 0
    for _ in range(2):
        rig.restart()
        assert rig.send(b"next", subject="quiet").places[0].first_sequence in (2, 3)
    (rig.directory / layout.QUEUE_TABLE).unlink()
    rig.restart()
    assert rig.send(b"next", subject="quiet").places[0].first_sequence == 4


def test_B8_a_queue_table_without_a_subject_that_lost_all_its_messages_is_not_believed(
    rig: Rig,
) -> None:
    """Else the next note of where the queues begin would forget the subject."""
    send(rig, 2, subject="quiet")
    send(rig, 12)
    assert keep_house(rig) > 0
    rig.close()
    disk = OsDisk(str(rig.directory))
    newest, *_ = read_queue_tables(disk, rig.store.store_id)
    queues = tuple(one for one in newest.queues if one.subject != "quiet")
    assert len(queues) == len(newest.queues) - 1
    for _ in layout.QUEUE_TABLES:
        write_queue_table(disk, msgspec.structs.replace(newest, queues=queues))
    disk.close()
    rig.start()
    before = rig.store.first_offset
    send(rig, 12)
    assert keep_house(rig) > before
    rig.restart()
    assert rig.send(b"next", subject="quiet").places[0].first_sequence == 2


def test_B11_queues_are_made_again_from_a_log_that_has_lost_its_beginning(rig: Rig) -> None:
    send(rig, 20)
    assert keep_house(rig) > 0
    before = first_sequence(rig)
    rig.close()
    for path in (rig.directory / "consumequeue" / SUBJECT).iterdir():
        path.unlink()
    (rig.directory / layout.QUEUE_TABLE).unlink()
    rig.start()
    assert first_sequence(rig) == before
    assert rig.pull(max_messages=100).sequences == list(range(before, 20))


def test_given_up_segments_are_written_again(rig: Rig) -> None:
    send(rig, 12)
    keep_house(rig)
    spares = [name for name in files(rig, "commitlog") if name.startswith("spare")]
    assert len(spares) == RETAINING.spare_segments
    send(rig, 12)
    assert not [name for name in files(rig, "commitlog") if name.startswith("spare")]
    rig.restart()
    assert rig.pull(max_messages=100).bodies[-12:] == [BODY] * 12


def test_B12_segments_are_found_and_removed_while_senders_continue(rig: Rig) -> None:
    send(rig, 20)
    waiting: list[Work] = []
    rig.store.retention.background.start = waiting.append
    before = files(rig, "commitlog")
    assert keep_house(rig) == 0, "where the queues begin is being looked for"
    send(rig, 1)
    waiting.pop()()
    send(rig, 1)
    assert rig.store.first_offset > 0, "the writer has taken it over"
    assert set(before) <= set(files(rig, "commitlog")), "the disk takes long to remove them"
    send(rig, 1)
    keep_house(rig)
    (work,) = waiting
    work()
    assert not set(before) <= set(files(rig, "commitlog"))
    assert rig.pull(max_messages=100).sequences == list(range(first_sequence(rig), 23))
    rig.restart()
    assert rig.pull(max_messages=100, group="other").sequences == list(
        range(first_sequence(rig), 23)
    )


def test_B12_what_lets_a_segment_go_is_durable_before_that_is_noted(rig: Rig) -> None:
    """A power cut would bring the group back to messages that are not there any more."""
    send(rig, 12)
    settle(rig, GROUP, rig.pull(max_messages=20, lease_ms=LONG_MS).ack())
    actions, seen = rig.store.actions.log, list[int]()

    def look(work: Work) -> None:
        seen.append(actions.durable_offset)
        work()

    rig.store.retention.background.start = look
    assert actions.durable_offset < actions.written_offset
    rig.clock.pass_ms(HOUR_MS)
    for _ in range(3):
        rig.broker.step()
        rig.broker.writer.step()
        rig.clock.pass_ms(1_000)
    assert rig.store.first_offset > 0
    assert seen[0] == actions.written_offset


def test_B12_what_was_asked_to_go_while_others_went_is_asked_for_again(rig: Rig) -> None:
    send(rig, 12)
    waiting: list[Work] = []
    rig.store.retention.background.start = waiting.append
    keep_house(rig)
    send(rig, 12)
    keep_house(rig)
    rig.store.retention.background.start = at_once
    (work,) = waiting
    work()
    assert keep_house(rig) == rig.store.retention.old_offset(rig.now_ms)


def test_B7_no_segment_goes_while_a_repeat_of_what_is_in_it_must_be_known(rig: Rig) -> None:
    with_options(rig, dedupe_ids=1_000, dedupe_ms=4 * HOUR_MS)
    send(rig, 20)
    assert keep_house(rig) == 0, "a repeat is compared with what is stored"
    rig.clock.pass_ms(HOUR_MS)
    send(rig, 1)  # the log's time has gone on by hours: older ids are forgotten
    assert keep_house(rig) > 0


def test_B11_no_segment_goes_before_its_entries_are_in_their_files(rig: Rig) -> None:
    with_options(rig, queue_flush_bytes=1024**3)
    send(rig, 20)
    queues, durable_offset = rig.store._queues, rig.store.durable_offset
    rig.store.give_up_below(durable_offset)
    assert (rig.store.first_offset, queues.indexed_offset) == (0, 0)
    while not rig.store.first_offset:
        rig.store.step()
        rig.store.give_up_below(durable_offset)
    assert rig.store.first_offset <= queues.indexed_offset


def test_B12_files_of_queues_go_with_their_messages_again_and_again(tmp_path: Path) -> None:
    entries = 4
    rig = Rig(tmp_path / "small", store_options=replace(RETAINING, queue_entries_per_file=entries))
    gone: list[int] = []
    for _ in range(3):
        send(rig, 20)
        keep_house(rig)
        first = first_sequence(rig)
        left = [int(name) // ENTRY_BYTES for name in files(rig, f"consumequeue/{SUBJECT}")]
        assert min(left) == first - first % entries, "all below the first message, and no other"
        gone.append(min(left))
    assert gone == sorted(set(gone))
    rig.close()


@pytest.mark.parametrize("end", ["in order", "after a failure"])
def test_B12_a_stop_waits_for_the_removal_that_is_under_way(rig: Rig, end: str) -> None:
    send(rig, 20)
    began, may_end, order = Event(), Event(), []

    def slowly(work: Work) -> None:
        def wait_and_work() -> None:
            began.set()
            may_end.wait(DEADLINE_S)
            order.append("work")
            work()

        in_a_thread(wait_and_work)

    def stop() -> None:
        rig.close()
        order.append("stop")

    rig.store.retention.background.start = slowly
    keep_house(rig)
    assert began.wait(DEADLINE_S)
    if end == "after a failure":
        rig.store._poison = "for the test"
    stopping = Thread(target=stop)
    stopping.start()
    stopping.join(0.1)
    may_end.set()
    stopping.join(DEADLINE_S)
    assert order[0] == "work", "who opens the directory next has it alone"
    if end == "in order":
        assert f"{0:020d}" not in files(rig, "commitlog"), "the next start has nothing left to do"
    rig.start()
    assert rig.store.first_offset > 0
    assert f"{0:020d}" not in files(rig, "commitlog")


def test_B12_a_removal_that_fails_is_the_last_thing_that_is_done(rig: Rig) -> None:
    send(rig, 20)
    waiting: list[Work] = []
    rig.store.retention.background.start = waiting.append
    keep_house(rig)
    waiting.pop()()
    rig.store.step()
    (rig.directory / "commitlog" / f"{0:020d}").unlink()  # what is there no more cannot be removed
    waiting.pop()()
    with pytest.raises(PoisonedError, match="removal of a segment"):
        rig.store.step()


def test_B12_the_disk_has_its_room_back_although_a_segment_was_being_read(rig: Rig) -> None:
    with_options(rig, spare_segments=0)
    send(rig, 20)
    reading = rig.store._commit_segments.file(0)
    keep_house(rig)
    assert reading.read(0, 4) == b"QMQF", "a read that has begun is not disturbed"
    assert len(_removed_and_open(rig)) == 1, "nothing else keeps a removed file"
    del reading
    assert not _removed_and_open(rig)


def _removed_and_open(rig: Rig) -> list[str]:
    """Files of the rig that were removed and still take room."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            path = str(descriptor.readlink())
            if path.startswith(str(rig.directory)) and path.endswith("(deleted)"):
                found.append(path)
    return found


def test_a_beginning_that_cannot_be_read_stops_the_start(rig: Rig) -> None:
    send(rig, 12)
    keep_house(rig)
    rig.close()
    path = rig.directory / layout.RETAINED
    content = path.read_bytes()
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(CorruptionError, match="retained"):
        rig.start()
    path.write_bytes(content)
    rig.start()
