"""A small world with a known truth: an outbox database, a broker's data directory, and what is wrong in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import sqlalchemy as sa

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.logs.frame_scan import ScannedFrame
from qmq_broker.storage.logs.kinds import LOG_LIMITS
from qmq_broker.storage.store import Store
from qmq_client.group.actions import Action
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, SENT, create_tables
from qmq_client.settings.sections import DatabaseSection
from qmq_client.wire.frame import (
    FrameKind,
    build_message_frame,
    parse_message_frame,
    read_header,
    stamp_frame,
)
from qmq_client.wire.marks import Marks, pack_marks
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record, record_crc

#: No window of ids: a test plants a message twice by storing it twice.
STORE = StoreOptions(
    segment_bytes=64 * 1024 * 1024,
    reserve_bytes=0,
    growth_bytes=512 * 1024,
    dedupe_ids=0,
    index_entries=0,
)
#: Short segments, given up as soon as they may be.
FORGETFUL = replace(
    STORE,
    segment_bytes=64 * 1024,
    spare_segments=0,
    dedupe_ids=1,
    dedupe_ms=1,
    checkpoint_ms=1,
    queue_flush_bytes=1,
)
#: One hour before the tests run would do; a fixed time makes the files the same each time.
START_MS = 1_760_000_000_000
HOUR_MS = 3_600_000
#: Not due while anybody runs the tests.
FAR_MS = START_MS + 20 * 365 * 24 * HOUR_MS


class WallClock:
    """Time that passes when the test says so."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.wall_ms = now_ms

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.wall_ms / 1000

    def sleep(self, seconds: float) -> None:
        self.wall_ms += round(seconds * 1000)


class DataDirectory:
    """A broker's files, written by the broker's own storage."""

    def __init__(self, path: Path, options: StoreOptions = STORE) -> None:
        self.path = path
        self.clock = WallClock()
        #: Ids of messages whose last byte is stored as another one, under their right checksum.
        self.spoilt: set[bytes] = set()
        self._options = options
        self.open()

    def open(self) -> None:
        self._disk = OsDisk(str(self.path))
        self.store = Store.open(self._disk, self.clock, self._options)

    def append(
        self,
        records: Iterable[Record],
        *,
        at_ms: int | None = None,
        frame_records: int = 100,
        kind: FrameKind = FrameKind.MESSAGES,
    ) -> None:
        """Store messages, synced, in frames of so many."""
        if at_ms is not None:
            self.clock.wall_ms = at_ms
        rows = list(records)
        for first in range(0, len(rows), frame_records):
            by_subject: dict[str, list[bytes]] = {}
            for record in rows[first : first + frame_records]:
                by_subject.setdefault(record.subject, []).append(self._encoded(record))
            frame = build_message_frame(by_subject, kind=kind)
            self.store.append([parse_message_frame(frame)])
        self.store.commit_and_step()
        self.settle()

    def _encoded(self, record: Record) -> bytes:
        data = encode_record(record)
        return spoilt(data) if record.message_id in self.spoilt else data

    def act(self, actions: Sequence[Action]) -> None:
        """Write actions of consumers, synced."""
        self.store.actions.append(actions)
        self.store.actions.sync()
        self.settle()

    def settle(self) -> None:
        """Let the second pass after which a running broker notes what is durable."""
        self.clock.wall_ms += 2_000
        self.store.step()

    def forget(self, segments: int) -> int:
        """Give up so many segments from the beginning; where the log begins then."""
        for _ in range(3):
            self.settle()
        wanted = self.store.first_offset + segments * self._options.segment_bytes
        self.store.give_up_below(wanted)
        assert self.store.first_offset == wanted
        return wanted

    def close(self) -> None:
        """Stop in order: the checkpoint says where the logs end."""
        self.store.close()
        self._disk.close()


def spoilt(data: bytes) -> bytes:
    """The encoded record with another last byte, under its old checksum."""
    return data[:-1] + bytes([data[-1] ^ 1])


def scanned(
    records: list[tuple[str, bytes]],
    *,
    kind: FrameKind = FrameKind.MESSAGES,
    offset: int = 4096,
    marks: Marks | None = None,
) -> ScannedFrame:
    """A frame as a log gives it back, with sequences from 10 on in each subject."""
    by_subject: dict[str, list[bytes]] = {}
    for subject, record in records:
        by_subject.setdefault(subject, []).append(record)
    packed = b"" if marks is None else pack_marks(kind, marks)
    frame = build_message_frame(by_subject, kind=kind, limits=LOG_LIMITS, marks=packed)
    head = stamp_frame(
        frame,
        physical_offset=offset,
        stored_at_ms=1_700_000_000_123,
        epoch=1,
        durable_offset=offset,
        first_sequences=[10] * len(by_subject),
    )
    data = head + frame[len(head) :]
    return ScannedFrame(offset, read_header(data), data)


class OutboxDatabase:
    """An SQLite outbox whose rows a test writes itself."""

    def __init__(self, path: Path, name: str = "orders", *, keep_sent_s: float = 86_400.0) -> None:
        self.section = DatabaseSection(name=name, url=f"sqlite:///{path}", keep_sent_s=keep_sent_s)
        self._engine = sa.create_engine(self.section.url)
        create_tables(self._engine)

    def insert(self, records: Iterable[Record], *, state: int = SENT, created_at_ms: int) -> None:
        rows = outbox_rows(records, created_at_ms, state=state)
        with self._engine.begin() as connection:
            if rows:
                connection.execute(sa.insert(DEFAULT_TABLES.outbox), rows)

    def execute(self, statement: sa.Executable) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)

    def close(self) -> None:
        self._engine.dispose()


def outbox_rows(
    records: Iterable[Record], created_at_ms: int, *, state: int = SENT
) -> list[dict[str, object]]:
    """The messages as rows of an outbox."""
    return [
        {
            "message_id": record.message_id,
            "subject": record.subject,
            "ordering_key": None,
            "record": encode_record(record),
            "state": state,
            "due_at_ms": created_at_ms + 86_400_000,
            "token": None,
            "attempts": 0 if state == LIVE else 1,
            "last_error": None,
            "created_at_ms": created_at_ms,
        }
        for record in records
    ]


def messages(
    ids: MessageIds,
    count: int,
    *,
    subjects: Sequence[str] = ("orders",),
    born_at_ms: int = START_MS,
) -> list[Record]:
    """Plain messages, spread over the subjects."""
    return [
        Record(
            message_id=ids.next_id(),
            subject=subjects[number % len(subjects)],
            body=b'{"number": %d}' % number,
            key=f"key {number % 7}" if number % 3 else None,
            tags=("red", "blue")[: number % 3],
            headers=(("trace", f"{number:08x}"), ("source", "EWR → IAH"))[: number % 4 and 2],
            born_at_ms=born_at_ms + number,
        )
        for number in range(count)
    ]


KINDS = ("lost", "ghost", "duplicate", "late", "altered")


@dataclass(slots=True)
class Corpus:
    """Messages with planted findings; `truth` is what an audit must find, and nothing else."""

    seed: int
    #: What is planted. Where it is one kind, nothing else makes the ids around it suspect.
    kinds: tuple[str, ...] = KINDS
    truth: set[tuple[str, str]] = field(default_factory=set)
    committed: int = 0
    stored: int = 0
    #: Sound, and not due yet.
    delayed: list[Record] = field(default_factory=list)

    def plant(self, database: OutboxDatabase, directory: DataDirectory, at_ms: int) -> None:
        """Fill both sides; every kind of finding is planted some times, the rest is sound."""
        draw = random.Random(self.seed)
        ids = MessageIds(draw.getrandbits(62), first_counter=draw.randrange(100_000))
        subjects = [f"corpus{self.seed}.s{number}" for number in range(draw.randint(1, 4))]
        count = draw.randint(300, 900)
        every = messages(ids, count, subjects=subjects, born_at_ms=at_ms)
        draw.shuffle(every)
        planted = [every.pop() for _ in range(draw.randint(10, 40))]
        by_kind: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        for number, record in enumerate(planted):
            kind = self.kinds[number % len(self.kinds)]
            by_kind[kind].append(record)
            self.truth.add((kind, record.message_id.hex()))
        # Some are other records, some the same with another byte in them, which their checksum does not say.
        altered = [_altered(one) for one in by_kind["altered"][::2]] + by_kind["altered"][1::2]
        directory.spoilt |= {one.message_id for one in by_kind["altered"][1::2]}
        rows = every + [one for kind, some in by_kind.items() if kind != "ghost" for one in some]
        database.insert(rows, created_at_ms=at_ms)
        now = every + by_kind["ghost"] + by_kind["duplicate"] + altered
        draw.shuffle(now)
        directory.append(now, at_ms=at_ms + 500, frame_records=draw.randint(1, 60))
        directory.append(by_kind["duplicate"], at_ms=at_ms + 1_000)
        directory.append(by_kind["late"], at_ms=at_ms + 10 * 60_000)
        self.delayed = [
            msgspec.structs.replace(one, due_at_ms=FAR_MS)
            for one in messages(ids, draw.randint(1, 20), subjects=subjects, born_at_ms=at_ms)
        ]
        database.insert(self.delayed, created_at_ms=at_ms)
        directory.append(self.delayed, kind=FrameKind.DELAYED)
        self.committed = len(rows) + len(self.delayed)
        self.stored = len(now) + len(by_kind["duplicate"]) + len(by_kind["late"])


def _altered(record: Record) -> Record:
    other = Record(
        message_id=record.message_id,
        subject=record.subject,
        body=record.body + b" ",
        born_at_ms=record.born_at_ms,
    )
    assert record_crc(encode_record(other)) != record_crc(encode_record(record))
    return other
