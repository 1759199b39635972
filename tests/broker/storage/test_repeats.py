"""B7: a message id is stored once, and a repeat is answered with its first place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.ids.repeats import is_same_message
from qmq_broker.storage.store import Store
from qmq_client.wire.frame import FrameKind, MessageFrame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.names import COPIES
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import SubjectPlace
from tests.broker.storage.lives import restarted
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World, make_frame, records_at, records_of, visible
from tests.kit.clock import FakeClock


def test_B7_a_repeat_is_answered_with_its_first_place_also_after_a_restart() -> None:
    world = World(RecordingDisk())
    frame = world.frame(orders=[10, 20], invoices=30)
    first = world.send(frame)[0]
    again = world.send(frame)[0]
    assert (again.duplicates, again.places) == (3, first.places)
    assert (again.physical_offset, again.stored_at_ms) == (
        first.physical_offset,
        first.stored_at_ms,
    )
    store = restarted(world)
    after = store.append([frame])[0]
    store.commit_and_step()
    assert (after.duplicates, after.places) == (3, first.places)
    assert visible(store) == {"orders": 2, "invoices": 1}


def test_B7_repeats_within_one_commit_are_known() -> None:
    world = World(RecordingDisk())
    frame = world.frame(orders=[10, 20])
    placed = world.store.append([frame, world.frame(orders=5), frame])
    assert (placed[2].duplicates, placed[2].places) == (2, placed[0].places)
    placed = world.store.append([frame])
    assert placed[0].duplicates == 2
    world.sync()
    assert world.visible() == {"orders": 3}


@pytest.mark.parametrize("where", ["an earlier commit", "this commit"])
def test_B7_the_id_of_a_message_under_another_subject_is_no_repeat_of_it(where: str) -> None:
    world, message_id = World(RecordingDisk()), MessageIds(7).next_id()

    def frame(subject: str) -> MessageFrame:
        record = Record(message_id=message_id, subject=subject, body=b"a", born_at_ms=1)
        return parse_message_frame(build_message_frame({subject: [encode_record(record)]}))

    if where == "an earlier commit":
        world.send(frame("orders"))
        placed = world.store.append([frame("invoices")])
    else:
        placed = world.store.append([frame("orders"), frame("invoices")])
    assert (placed[-1].conflict, placed[-1].duplicates) == (None, 0)
    world.store.commit_and_step()
    store = restarted(world)
    assert visible(store) == {"orders": 1, "invoices": 1}
    for subject in ("orders", "invoices"):
        again = store.append([frame(subject)])[0]
        place = SubjectPlace(subject=subject, first_sequence=0, count=1)
        assert (again.duplicates, again.places) == (1, (place,))
    store.commit_and_step()
    assert visible(store) == {"orders": 1, "invoices": 1}


def test_B7_one_frame_may_hold_an_id_under_several_subjects() -> None:
    world, message_id = World(RecordingDisk()), MessageIds(7).next_id()
    records = {
        subject: [
            encode_record(Record(message_id=message_id, subject=subject, body=b"a", born_at_ms=1))
        ]
        for subject in ("orders", "invoices", "bills")
    }
    some = {subject: records[subject] for subject in ("orders", "bills")}
    world.send(parse_message_frame(build_message_frame(some)))
    placed = world.send(parse_message_frame(build_message_frame(records)))[0]
    assert placed.duplicates == 2
    assert [one.subject for one in placed.places] == ["orders", "invoices", "bills"]
    assert world.visible() == {"orders": 1, "invoices": 1, "bills": 1}


def test_B7_a_frame_of_new_and_repeated_messages_stores_the_new_ones() -> None:
    ids = MessageIds(7)
    records = [
        encode_record(Record(message_id=ids.next_id(), subject="orders", body=body, born_at_ms=1))
        for body in (b"a", b"b", b"c", b"d", b"e")
    ]
    invoice = encode_record(
        Record(message_id=ids.next_id(), subject="invoices", body=b"i", born_at_ms=1)
    )

    def frame(**content: list[bytes]) -> MessageFrame:
        return parse_message_frame(build_message_frame(content))

    world = World(RecordingDisk())
    world.store.append([frame(orders=[records[1]]), frame(orders=[records[3]])])
    world.store.commit_and_step()
    placed = world.store.append([frame(orders=records, invoices=[invoice])])[0]
    world.store.commit_and_step()
    assert placed.duplicates == 2
    orders = [
        place.first_sequence + number
        for place in placed.places
        if place.subject == "orders"
        for number in range(place.count)
    ]
    assert orders == [2, 0, 3, 1, 4]
    assert placed.places[-1] == SubjectPlace(subject="invoices", first_sequence=0, count=1)
    stored = records_of(world.store, "orders")
    assert [stored[sequence] for sequence in orders] == records
    again = world.store.append([frame(orders=records, invoices=[invoice])])[0]
    assert (again.duplicates, again.places) == (6, placed.places)


def test_B7_a_message_that_is_twice_in_one_frame_is_stored_once() -> None:
    record = make_frame(MessageIds(7), {"orders": 10}).record(0)
    frame = parse_message_frame(build_message_frame({"orders": [record, record, record]}))
    world = World(RecordingDisk())
    placed = world.store.append([frame])[0]
    world.store.commit_and_step()
    assert placed.duplicates == 2
    assert records_of(world.store, "orders") == [record]


@pytest.mark.parametrize("beside", ["orders", "invoices"])
def test_B7_an_id_with_other_content_refuses_its_frame_and_no_other(beside: str) -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=10))
    message_id = world.history.sent[0].frame.message_ids()[0]
    other = encode_record(
        Record(message_id=message_id, subject="orders", body=b"other", born_at_ms=1)
    )
    new = world.frame(**{beside: 20}).record(0)
    content = {"orders": [new, other]} if beside == "orders" else {beside: [new], "orders": [other]}
    conflicting = parse_message_frame(build_message_frame(content))
    placed = world.store.append([world.frame(orders=1), conflicting, world.frame(orders=2)])
    world.store.commit_and_step()
    assert [place.conflict for place in placed] == [None, message_id, None]
    assert placed[1].places == ()
    assert world.visible() == {"orders": 3}


def test_B7_a_refused_frame_leaves_its_other_ids_free() -> None:
    world = World(RecordingDisk())
    world.send(world.frame(orders=10))
    message_id = world.history.sent[0].frame.message_ids()[0]
    new = world.frame(orders=20)
    other = encode_record(Record(message_id=message_id, subject="orders", body=b"o", born_at_ms=1))
    refused = parse_message_frame(build_message_frame({"orders": [new.record(0), other]}))
    for again in (world.store.append([refused]), world.send(refused, new)):
        assert again[0].conflict == message_id
    assert again[1].duplicates == 0, "also beside it, in one append"
    assert visible(world.store) == {"orders": 2}


def test_B7_a_message_that_is_made_again_under_its_id_is_a_repeat() -> None:
    content = {"message_id": MessageIds(9).next_id(), "subject": "orders", "body": b"body"}

    def made(born_at_ms: int, **changes: object) -> bytes:
        given: dict[str, Any] = {
            **content,
            "born_at_ms": born_at_ms,
            "key": "k",
            "tags": ("t",),
            **changes,
        }
        return encode_record(Record(**given))

    later = {"due_at_ms": 500, "expires_at_ms": 900}
    for first, again in (
        (made(1), made(7)),
        (made(1, **later), made(7, **later)),
        (made(1, **later), made(7, due_at_ms=506, expires_at_ms=906)),
    ):
        assert is_same_message(first, again)
    for first, other in (
        (made(1), made(7, body=b"ydob")),
        (made(1), made(7, key="l")),
        (made(1), made(7, tags=("u",))),
        (made(1, **later), made(7, due_at_ms=501, expires_at_ms=900)),
        (made(1, **later), made(7, due_at_ms=500, expires_at_ms=901)),
        (made(1, due_at_ms=5), made(1, expires_at_ms=5)),
    ):
        assert not is_same_message(first, other)


def test_B4_B7_a_repeat_of_a_damaged_frame_is_stored_again_and_known_from_then_on() -> None:
    world = World(RecordingDisk())
    frame = world.frame(orders=[40, 50])
    world.send(frame)
    path = layout.segment_path(layout.COMMIT_LOG, 0)
    inode = world.disk.image.inodes[world.disk.image.names[path] or 0]
    position = world.history.sent[0].placed.physical_offset + frame.positions[0] + 60
    content = bytearray(inode.seen)
    content[position] ^= 1
    inode.durable = bytes(content)
    inode.versions.clear()
    for duplicates in (0, 2, 2):
        placed = world.store.append([frame])[0]
        world.store.commit_and_step()
        assert (placed.duplicates, placed.conflict) == (duplicates, None)
        assert placed.places[0].first_sequence == 2
    assert records_at(world.store, placed.places[0]) == [frame.record(0), frame.record(1)]


def test_B7_copies_that_the_broker_makes_itself_take_no_room_in_the_window() -> None:
    world = World(RecordingDisk(), options=replace(OPTIONS, dedupe_ids=4))
    first, own = world.frame(orders=[10, 20]), MessageIds(1)
    world.send(first)
    for _ in range(8):
        copy = encode_record(
            Record(message_id=own.next_id(), subject=COPIES, body=b"c", born_at_ms=1, due_at_ms=9)
        )
        data = build_message_frame({COPIES: [copy]}, kind=FrameKind.DELAYED)
        world.store.append([parse_message_frame(data)])
        world.store.commit_and_step()
    assert world.store.append([first])[0].duplicates == 2
    world.store.commit_and_step()
    disk = world.disk
    for _ in ("by frames that nobody has read", "by frames of which only the ids are gone"):
        disk.unlock()
        disk = RecordingDisk(disk.image)
        store = Store.open(disk, FakeClock(), world.options)
        assert store.append([first])[0].duplicates == 2
        store.commit_and_step()
        assert visible(store)["orders"] == 2
        store.close()
        for path in [one for one in disk.image.names if one.startswith(f"{layout.IDS}/")]:
            del disk.image.names[path]
