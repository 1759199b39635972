"""What the pipeline's benchmarks read: a log, an outbox, consumers' actions; and reading it without Spark."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.result import Conditions
from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.group.actions import Acked, Action, GroupDefined, Pulled
from qmq_client.outbox.table import SENT, create_tables
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.frame import FrameKind, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MESSAGE_ID_BYTES, MessageIds
from qmq_client.wire.record import (
    MESSAGE_ID_POSITION,
    RECORD_FIXED_BYTES,
    Record,
    decode_record,
    encode_record,
)

FRAME_MESSAGES: Final = 500
SUBJECTS: Final = 20
BODY_BYTES: Final = 100
GROUP: Final = "billing"
_FRAMES_PER_COMMIT: Final = 64
#: Of the time at the end of a record's fixed part.
_TIME_BYTES: Final = 8
_LEASE_MS: Final = 30_000
_DAY_MS: Final = 86_400_000
_INSERT: Final = (
    "INSERT INTO qmq_outbox (message_id, subject, record, state, due_at_ms, attempts, created_at_ms) "
    f"VALUES (?, ?, ?, {SENT}, ?, 1, ?)"
)


def fill(
    directory: Path, messages: int, *, outbox: Path | None = None, body_bytes: int = BODY_BYTES
) -> None:
    """A broker's data directory with so many messages, closed as a broker closes it.

    With an `outbox` there is a row of each message in it, and one group has pulled and acked all of them.
    Requires: a multiple of `FRAME_MESSAGES`.
    """
    Filling(directory, outbox=outbox, body_bytes=body_bytes).add(messages)


class Filling:
    """A data directory, and an outbox beside it, to which messages are added from time to time."""

    def __init__(
        self, directory: Path, *, outbox: Path | None = None, body_bytes: int = BODY_BYTES
    ) -> None:
        self._directory = directory
        self._outbox = outbox
        self._frames = _frames(body_bytes)
        self._group = _Group()
        #: How many there are.
        self.messages = 0

    def add(self, messages: int) -> None:
        """So many more, and the broker's files closed as a broker closes them."""
        options = StoreOptions(dedupe_ids=0, index_entries=0, segment_bytes=256 * 1024 * 1024)
        store = Store.open(OsDisk(str(self._directory)), SYSTEM_CLOCK, options)
        rows = None if self._outbox is None else _Outbox(self._outbox)
        for left in range(messages // FRAME_MESSAGES, 0, -_FRAMES_PER_COMMIT):
            some = list(itertools.islice(self._frames, min(left, _FRAMES_PER_COMMIT)))
            frames = [parse_message_frame(build_message_frame(frame)) for frame in some]
            store.append(frames)
            store.commit_and_step()
            if rows is not None:
                rows.insert(some)
                done = [one for frame in frames for one in self._group.act(frame.runs[0])]
                store.actions.append(done)
                store.actions.sync()
        store.close()
        if rows is not None:
            rows.close()
        self.messages += messages


class _Group:
    """One consumer that is done with each frame at once."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def act(self, run: Any) -> Iterator[Action]:
        now_ms, subject = SYSTEM_CLOCK.now_ms(), run.subject
        first = self._next.get(subject, 0)
        after = self._next[subject] = first + run.count
        if first == 0:
            yield GroupDefined(now_ms, subject, GROUP, 0, 5)
        runs = (DeliveryRun(first, run.count, 1),)
        yield Pulled(now_ms, subject, GROUP, "one", 1, first, runs, now_ms + _LEASE_MS)
        yield Acked(now_ms, subject, GROUP, "one", first, after)


class _Outbox:
    """Rows that were sent and are kept, in SQLite."""

    def __init__(self, path: Path) -> None:
        import sqlalchemy as sa

        engine = sa.create_engine(f"sqlite:///{path}")
        create_tables(engine)
        engine.dispose()
        self._connection = sqlite3.connect(path)
        self._connection.execute("PRAGMA synchronous = OFF")

    def insert(self, frames: list[dict[str, list[bytes]]]) -> None:
        now_ms = SYSTEM_CLOCK.now_ms()
        self._connection.executemany(
            _INSERT,
            (
                (record[4:20], subject, record, now_ms + _DAY_MS, now_ms)
                for frame in frames
                for subject, records in frame.items()
                for record in records
            ),
        )
        self._connection.commit()

    def close(self) -> None:
        self._connection.close()


def plain_scan(directory: Path) -> int:
    """Every field of every message as a tuple, by one process without Spark or Arrow."""
    count = 0
    for subject, data, _ in plain_records(directory):
        record = decode_record(subject, data)
        _ = tuple(getattr(record, name) for name in Record.__struct_fields__)
        count += 1
    return count


def plain_records(directory: Path) -> Iterator[tuple[str, bytes, int]]:
    """Subject, encoded record and time of storing of every message."""
    from qmq_pipeline.places.log import COMMIT_LOG
    from qmq_pipeline.places.options import PART_BYTES, Place
    from qmq_pipeline.places.places import open_log

    reader = open_log(Place(path=str(directory)), COMMIT_LOG)
    bounds = reader.bounds()
    part_bytes = reader.part_bytes(PART_BYTES)
    for within in reader.parts(bounds.first_offset, bounds.next_offset, part_bytes):
        for scanned in reader.frames(within):
            if scanned.header.kind is FrameKind.MESSAGES:
                stored_at_ms = scanned.header.stored_at_ms
                for subject, data in parse_message_frame(scanned.data).records():
                    yield subject, data, stored_at_ms
    reader.close()


class Folders:
    """Folders for what is written again in each round; the one before goes first."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._number = 0

    def fresh(self) -> str:
        """A name that nothing stands under. The first one stays: others read it."""
        if self._number > 1:
            shutil.rmtree(self._parent / str(self._number), ignore_errors=True)
        self._number += 1
        return str(self._parent / str(self._number))

    def remove(self) -> None:
        """All of them go."""
        shutil.rmtree(self._parent, ignore_errors=True)


def conditions(messages: int, note: str = "", *, body_bytes: int = BODY_BYTES) -> Conditions:
    """What the figures were measured with."""
    what = f"{messages:,} messages of {SUBJECTS} subjects, with key and two headers"
    return Conditions(
        durability="none",
        client=f"local session, {os.cpu_count()} cores",
        batch_messages=FRAME_MESSAGES,
        message_bytes=body_bytes,
        note=f"{what}; {note}" if note else what,
    )


def _frames(body_bytes: int) -> Iterator[dict[str, list[bytes]]]:
    """Frames without end, each of one subject, the ids as a producer makes them.

    The wire encodes each record of a frame once; of the later ones only what differs is put between
    what stays, because encoding millions would take longer than what is measured with them.
    """
    ids, draw = MessageIds(1), random.Random(7)
    names = [f"subject-{number}" for number in range(SUBJECTS)]
    patterns = [_pattern(number) for number in range(FRAME_MESSAGES)]
    for number in itertools.count():
        name = names[number % SUBJECTS]
        seed = crc32c(name.encode())
        born_at = SYSTEM_CLOCK.now_ms().to_bytes(_TIME_BYTES)
        bodies = draw.randbytes(body_bytes * FRAME_MESSAGES)
        records = []
        for i, (head, tail) in enumerate(patterns):
            body = bodies[i * body_bytes : (i + 1) * body_bytes]
            content = b"".join((ids.next_id(), head, born_at, tail, body))
            records.append(crc32c(content, seed).to_bytes(MESSAGE_ID_POSITION) + content)
        yield {name: records}


def _pattern(number: int) -> tuple[bytes, bytes]:
    """What stands between the id and the time of birth of such a record of a frame, and between that and the body."""
    record = Record(
        message_id=bytes(MESSAGE_ID_BYTES),
        subject="any",
        key=f"customer-{number % 50}",
        headers=(("source", "benchmark"), ("trace", f"{number:016x}")),
        body=b"",
        born_at_ms=0,
    )
    data = encode_record(record)
    born_at = RECORD_FIXED_BYTES - _TIME_BYTES
    return data[MESSAGE_ID_POSITION + MESSAGE_ID_BYTES : born_at], data[RECORD_FIXED_BYTES:]
