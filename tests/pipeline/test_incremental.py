"""Tables that follow from others are made by part: the same rows as when all is made anew, for less work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import sqlalchemy as sa

from qmq_client.group.actions import (
    Acked,
    Action,
    BroughtBack,
    Dead,
    Ended,
    Expired,
    GroupDefined,
    Passed,
    Pulled,
    Replayed,
    SetAside,
    Sought,
)
from qmq_client.outbox.table import DEFAULT_TABLES
from qmq_client.wire.deliveries import DeliveryRun
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import MARTS, marts
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import DELIVERIES, FLOW_MINUTE, LIFECYCLE
from qmq_pipeline.tables.store import Tables
from qmq_pipeline.tables.table import Table
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import rows_of
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECTS = ("orders", "flight.departed")
GROUPS = ("billing", "mail")
HOUR_MS = 3_600_000
#: Small, so that a few hundred messages are several parts and days.
CUT = PipelineConfig(tables="set by the test", outbox_safety_s=0.0, part_bytes=16 * 1024)
#: No row is old enough to be read for the last time.
_AGES_S = 9 * 365 * 86_400.0
#: A sketch holds the same values in another order; what it says is compared.
_NOT_COMPARED = frozenset({"sketch", "folded_to"})


class Life:
    """A random life of a broker, in steps: messages, copies, delays, groups that do what groups do."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._draw = random.Random(seed)
        self.database = OutboxDatabase(folder / "orders.db")
        self.directory = DataDirectory(folder / "broker")
        self._ids = MessageIds(seed + 1)
        self._stored: dict[str, list[Record]] = {subject: [] for subject in SUBJECTS}
        self._waiting: list[Record] = []
        self._unseen: list[tuple[Record, int]] = []
        self._now_ms = START_MS
        self._pull: dict[tuple[str, str], int] = {}
        self._cursor: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
        self._dead: dict[tuple[str, str], list[int]] = {}

    def step(self) -> None:
        """Some messages, and something of every group."""
        draw = self._draw
        self._now_ms += draw.choice((1_000, 60_000, 7 * HOUR_MS))
        fresh = messages(
            self._ids, draw.randint(0, 60), subjects=SUBJECTS, born_at_ms=self._now_ms - 50
        )
        # Some rows are seen by a later scan than their messages, some are not sent yet.
        late = draw.randint(0, len(fresh))
        self.database.insert(fresh[late:], created_at_ms=self._now_ms - 40)
        for record, at_ms in self._unseen:
            self.database.insert([record], created_at_ms=at_ms)
        self._unseen = [(one, self._now_ms - 40) for one in fresh[:late] if draw.random() < 0.8]
        self._store(fresh[: len(fresh) - draw.randint(0, min(3, len(fresh)))])
        every = [one for some in self._stored.values() for one in some]
        self._store(draw.sample(every, min(len(every), draw.randint(0, 2))))
        self._delay()
        actions = [
            one for subject in SUBJECTS for group in GROUPS for one in self._act(subject, group)
        ]
        if actions:
            self.directory.act(actions)

    def _store(self, records: list[Record], kind: FrameKind = FrameKind.MESSAGES) -> None:
        self.directory.append(records, at_ms=self._now_ms, frame_records=7, kind=kind)
        for record in records if kind is FrameKind.MESSAGES else ():
            self._stored.setdefault(record.subject, []).append(record)

    def _delay(self) -> None:
        draw = self._draw
        due = [
            msgspec.structs.replace(one, due_at_ms=self._now_ms + HOUR_MS)
            for one in messages(self._ids, draw.randint(0, 3), subjects=SUBJECTS)
        ]
        self._store(due, FrameKind.DELAYED)
        self._waiting += due
        draw.shuffle(self._waiting)
        released = [self._waiting.pop() for _ in range(draw.randint(0, len(self._waiting)))]
        self._store(released)

    def _act(self, subject: str, group: str) -> Iterator[Action]:
        draw, key = self._draw, (subject, group)
        here = (self._now_ms + 500, subject, group)
        count = len(self._stored[subject])
        if key not in self._cursor:
            if draw.random() < 0.6:
                self._cursor[key] = draw.randint(0, count)
                self._pull[key], self._held[key], self._dead[key] = 0, [], []
                yield GroupDefined(*here, self._cursor[key], 5)
            return
        for _ in range(draw.randint(0, 4)):
            yield from self._pulled(key, here, count)
        for one in list(self._held[key]):
            if draw.random() < 0.6:
                self._held[key].remove(one)
                yield from self._settled(key, here, one)
        chance = draw.random()
        if chance < 0.1 and self._dead[key]:
            sequence = self._dead[key].pop()
            yield Replayed(*here, sequence, sequence + 1)
        elif chance < 0.2:
            self._cursor[key] = count
            yield Passed(*here, count)
        elif chance < 0.27:
            self._cursor[key], self._held[key] = draw.randint(0, count), []
            yield Sought(*here, self._cursor[key])
        elif chance < 0.3:
            del self._cursor[key]
            yield Ended(*here)

    def _pulled(
        self, key: tuple[str, str], here: tuple[int, str, str], count: int
    ) -> Iterator[Action]:
        first = self._cursor[key] + self._draw.randint(0, 2)
        taken = min(self._draw.randint(1, 12), count - first)
        if taken > 0:
            pull = self._pull[key]
            runs = (DeliveryRun(first, taken, 1),)
            yield Pulled(*here, "c1", 1, pull, runs, here[0] + 30_000)
            self._held[key].append((pull, pull + taken, first))
            self._pull[key], self._cursor[key] = pull + taken, first + taken

    def _settled(
        self, key: tuple[str, str], here: tuple[int, str, str], held: tuple[int, int, int]
    ) -> Iterator[Action]:
        first, after, sequence = held
        chance = self._draw.random()
        if chance < 0.7:
            yield Acked(*here, "c1", first, after)
        elif chance < 0.85:
            self._dead[key].append(sequence)
            yield Dead(*here, sequence, 1, "rejected", "no such customer")
            yield Expired(*here, "c1", first, first + 1, 0)
            if first + 1 < after:
                yield Acked(*here, "c1", first + 1, after)
        else:
            yield Expired(*here, "c1", first, after, here[0] + 1)
            if self._draw.random() < 0.5:
                yield SetAside(*here, sequence, sequence + after - first, 1)
                if self._draw.random() < 0.5:
                    return
                for one in range(sequence, sequence + after - first):
                    yield BroughtBack(*here, one, one)
            runs = (DeliveryRun(sequence, after - first, 2),)
            yield Pulled(*here, "c1", 1, self._pull[key], runs, here[0] + 30_000)
            self._held[key].append((self._pull[key], self._pull[key] + after - first, sequence))
            self._pull[key] += after - first

    def whisper(self) -> None:
        """Three messages that no group is waiting for."""
        self._now_ms += 60_000
        self._store(messages(self._ids, 3, subjects=("nobody.cares",), born_at_ms=self._now_ms))

    def forget_rows(self) -> None:
        """What was sent leaves the outbox, as it does where rows are not kept."""
        self.database.execute(sa.delete(DEFAULT_TABLES.outbox).where(sa.text("id % 3 = 0")))


def contents(tables: str, table: Table) -> list[str]:
    """What is compared of its rows, in no order."""
    return sorted(
        repr({name: value for name, value in row.items() if name not in _NOT_COMPARED})
        for row in rows_of(tables, table)
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One life takes half a minute; five are lived before a release."""
    lives = 5 if metafunc.config.getoption("--release") else 1
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(lives))


def test_P2_tables_made_by_part_over_random_cuts_are_those_made_as_a_whole(
    spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    life = Life(seed, tmp_path)
    config = replace(
        CUT,
        tables=str(tmp_path / "tables"),
        place=Place(path=str(life.directory.path)),
        databases=(life.database.section,),
    )
    draw = random.Random(seed)
    for number in range(3):
        for _ in range(draw.randint(2, 6)):
            life.step()
        # What comes in in the last round is read again by each scan.
        scanning = config if number < 2 else replace(config, outbox_safety_s=_AGES_S)
        write_bronze(scanning)
        lifecycle(spark, config)
        if number != 1:  # once the gold tables fall behind
            marts(spark, config)
        if number == 1:
            life.forget_rows()
    life.whisper()
    write_bronze(config)
    done = lifecycle(spark, config)
    # The last part of the log, or the last two, and what has no place in the log.
    every = {row["part"] for row in rows_of(config.tables, LIFECYCLE)}
    assert done.parts_made is not None
    assert done.parts_made <= 3 < len(every)
    assert marts(spark, config).days_made
    made = (DELIVERIES, LIFECYCLE, *MARTS)
    parts = {table.name: contents(config.tables, table) for table in made}
    assert lifecycle(spark, config).is_unchanged
    assert lifecycle(spark, config, is_full=True).parts_made is None
    assert not marts(spark, config, is_full=True).is_unchanged
    whole = {table.name: contents(config.tables, table) for table in made}
    for name, rows in whole.items():
        assert parts[name] == rows, name
    assert all(whole[table.name] for table in made)
    # Rows that are read once more, as young ones are, and are as they were, are not written again; others change nothing.
    outbox = replace(scanning, place=None)
    assert write_bronze(outbox).outbox == {"orders": 0}
    life.database.execute(sa.update(DEFAULT_TABLES.outbox).values(attempts=7))
    assert write_bronze(outbox).outbox["orders"] == 0, "what was sent does not change"
    lifecycle(spark, config)
    assert contents(config.tables, LIFECYCLE) == whole[LIFECYCLE.name]
    marts(spark, config)
    assert contents(config.tables, FLOW_MINUTE) == whole[FLOW_MINUTE.name]
    life.directory.close()
    life.database.close()


def test_P2_a_fold_that_died_is_done_again_and_rows_that_a_group_did_not_come_to_go_when_it_ends(
    spark: SparkSession, directory: DataDirectory, tmp_path: Path
) -> None:
    config = replace(CUT, tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    directory.append(messages(MessageIds(1), 120), frame_records=10)
    here, other = ((START_MS, "orders", group) for group in GROUPS)
    steps: list[list[Action]] = [
        [
            GroupDefined(*here, 0, 5),
            Pulled(*here, "c1", 1, 0, (DeliveryRun(0, 10, 1),), START_MS),
            GroupDefined(*other, 0, 5),
            Pulled(*other, "c1", 1, 0, (DeliveryRun(0, 10, 1),), START_MS),
        ],
        [
            Expired(*here, "c1", 0, 10, 0),
            Pulled(*here, "c1", 1, 10, (DeliveryRun(0, 3, 2),), START_MS),
            Dead(*here, 3, 2, "rejected", ""),
            Acked(*here, "c1", 10, 12),
            Ended(*other),
        ],
    ]
    noted = dict[str, Any]()
    for actions in steps:
        noted = Tables(spark, config.tables).progress("lifecycle")
        directory.act(actions)
        write_bronze(config)
        lifecycle(spark, config)
    made = contents(config.tables, LIFECYCLE)
    assert sum(f"'consumer_group': '{GROUPS[1]}'" in row for row in made) == 10
    Tables(spark, config.tables).note_progress(
        "lifecycle", noted
    )  # as if it had died before it noted anything
    lifecycle(spark, config)
    assert contents(config.tables, LIFECYCLE) == made
    lifecycle(spark, config, is_full=True)
    assert contents(config.tables, LIFECYCLE) == made


def test_P2_what_happened_to_messages_that_are_not_read_yet_is_folded_when_they_are(
    spark: SparkSession, directory: DataDirectory, tmp_path: Path
) -> None:
    """An archive has no open segment, and a run may read actions that happened after it read the log."""
    config = replace(CUT, tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    every = messages(MessageIds(1), 12)
    directory.append(every[:10], at_ms=START_MS, frame_records=5)
    here = (START_MS + 60_000, "orders", GROUPS[0])
    directory.act(
        [
            GroupDefined(*here, 0, 5),
            Pulled(*here, "c1", 1, 0, (DeliveryRun(0, 4, 1),), START_MS),
        ]
    )
    directory.act(
        [
            Pulled(*here, "c1", 1, 4, (DeliveryRun(4, 8, 1),), START_MS),
            Acked(*here, "c1", 0, 12),
        ]
    )
    write_bronze(config)
    assert lifecycle(spark, config).deliveries == 4
    directory.append(every[10:], at_ms=START_MS + 30_000)
    write_bronze(config)
    assert lifecycle(spark, config).deliveries == 12
    assert {row["outcome"] for row in rows_of(config.tables, DELIVERIES)} == {"acked"}
