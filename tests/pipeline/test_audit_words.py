"""P4: whatever a look at every row finds, tallies have a doubt about; and of sound ids they have none."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest

from qmq_pipeline.jobs.audit_window import Window
from qmq_pipeline.jobs.audit_words import (
    CANCELLED,
    OPEN,
    OPEN_ONCE,
    REASONS,
    RELEASED,
    SETTLED,
    STORED,
    Kept,
    Words,
)
from qmq_pipeline.jobs.audit_words import SCHEDULED as WAITING
from qmq_pipeline.tables import schemas
from qmq_pipeline.tables.table import Table
from qmq_pipeline.tables.tallies import AUDITED, Columns, Tallying, joined

LATE_MS = 60_000
NEXT_MS = 10_000_000
GAP = (4_000_000, 4_500_000)
Id = tuple[int, int]


@dataclass(slots=True)
class Row:
    """A row of an outbox as its newest scan saw it."""

    crc: int
    created_ms: int
    state: str = "sent"
    is_gone: bool = False


@dataclass(slots=True)
class World:
    """Rows of both sides, as their tables have them."""

    rows: dict[Id, Row] = field(default_factory=dict)
    #: Scans one after another: rows as (id, checksum, state, time).
    scans: list[list[tuple[Id, int, str, int]]] = field(default_factory=lambda: [[], [], []])
    stored: list[tuple[Id, int, int, int | None]] = field(default_factory=list)
    #: In order of the log.
    scheduled: list[tuple[Id, int, int, int]] = field(default_factory=list)
    cancelled: set[Id] = field(default_factory=set)

    def words(self, window: Window) -> Words:
        """From tallies, as files would have them."""
        sided = [
            *self._scan_sides(),
            _sided(schemas.MESSAGES, STORED, RELEASED, [_message(*one) for one in self.stored]),
            _sided(schemas.SCHEDULED, WAITING, WAITING, [_waiting(*one) for one in self.scheduled]),
            _sided(
                schemas.CANCELLED,
                CANCELLED,
                CANCELLED,
                [{**_id(one), "cancelled_at": 0} for one in self.cancelled],
            ),
        ]
        return Words(joined(sided), window)

    def _scan_sides(self) -> list[Columns]:
        last = len(self.scans) - 1
        return [
            _sided(
                schemas.OUTBOX,
                SETTLED,
                OPEN if number == last else OPEN_ONCE,
                [_row(*one) for one in scan],
            )
            for number, scan in enumerate(self.scans)
        ]


def _id(one: Id) -> dict[str, object]:
    return {"producer": one[0], "counter": one[1]}


def _row(one: Id, crc: int, state: str, created_ms: int) -> dict[str, object]:
    values = {"record_crc": crc, "state": state, "created_at": created_ms * 1000}
    return {**_id(one), **values}


def _message(one: Id, crc: int, stored_ms: int, due_ms: int | None) -> dict[str, object]:
    due_at = None if due_ms is None else due_ms * 1000
    return {**_id(one), "record_crc": crc, "stored_at": stored_ms * 1000, "due_at": due_at}


def _waiting(one: Id, crc: int, due_ms: int, now_due_ms: int) -> dict[str, object]:
    times = {"due_at": due_ms * 1000, "now_due_at": now_due_ms * 1000}
    return {**_id(one), "record_crc": crc, **times}


def _sided(table: Table, plain: int, apart: int, rows: list[dict[str, object]]) -> Columns:
    tallying = Tallying(table)
    schema = table.arrow(AUDITED[table.name].columns)
    for first in range(0, len(rows), 7):
        tallying.add(pa.RecordBatch.from_pylist(rows[first : first + 7], schema=schema))
    tally = tallying.tally()
    columns = {name: tally[name].to_numpy(zero_copy_only=False) for name in tally.schema.names}
    return {**columns, "side": np.where(columns["is_apart"], apart, plain)}


def planted(seed: int) -> World:
    """A few words of some producers; each id has lived one of the lives that ids can have, or was struck by a fault."""
    draw, world = random.Random(seed), World()
    for producer in draw.sample((-5, 1, 2, 2**62), draw.randint(1, 3)):
        first = draw.choice((-100, 0, 1_000_000, 2**63 - 200))
        fault_rate = draw.choice((0.0, 0.02, 0.3))
        for counter in range(first, first + draw.randint(1, 150)):
            _live(world, draw, (producer, counter), draw.random() < fault_rate)
    for scan in world.scans:
        draw.shuffle(scan)
    draw.shuffle(world.stored)
    return world


def _live(world: World, draw: random.Random, one: Id, is_struck: bool) -> None:
    crc, created_ms = draw.getrandbits(32), draw.randrange(NEXT_MS + 500_000)
    fault = draw.choice(FAULTS) if is_struck else ""
    stored_ms = created_ms + draw.randrange(LATE_MS) + (500_000 if "late" in fault else 0)
    _scan(world, draw, one, crc ^ (fault == "row altered"), created_ms, fault)
    if fault == "ghost":
        world.rows.pop(one, None)
        world.scans = [[row for row in scan if row[0] != one] for scan in world.scans]
    if fault in ("lost", "waiting"):
        return
    is_delayed = draw.random() < 0.3 or fault in (
        "overdue",
        "cancelled",
        "put off",
        "other release",
    )
    if not is_delayed:
        world.stored.append((one, crc, stored_ms, None))
        if fault == "thrice, twice otherwise":
            world.stored += 2 * [(one, crc ^ 1, stored_ms + 10_000, None)]
        if fault == "twice":
            world.stored.append((one, crc ^ draw.randrange(2), stored_ms + 10_000, None))
        return
    due_ms = created_ms + 100_000
    world.scheduled.append((one, crc, due_ms, due_ms))
    if fault == "put off":
        world.scheduled.append((one, crc, due_ms, due_ms + draw.choice((-90_000, 300_000))))
    if fault == "cancelled":
        world.cancelled.add(one)
    if fault != "overdue" and (fault != "cancelled" or draw.random() < 0.5):
        late_ms = draw.randrange(LATE_MS) + (500_000 if "late" in fault else 0)
        released = crc ^ (fault == "other release")
        world.stored.append((one, released, due_ms + late_ms, due_ms))


FAULTS = (
    "late",
    "row altered",
    "ghost",
    "lost",
    "waiting",
    "twice",
    "overdue",
    "put off",
    "cancelled",
    "other release",
    "gone",
    "gone and late",
    "thrice, twice otherwise",
    "read again",
)


def _scan(
    world: World, draw: random.Random, one: Id, crc: int, created_ms: int, fault: str
) -> None:
    """The row as three scans see it: open or young at first, settled later; or gone in between."""
    first = draw.randrange(3)
    is_early = first < 2
    state = "live" if fault.startswith(("waiting", "gone")) else draw.choice(("sent", "live"))
    before = (
        crc if draw.random() < 0.8 else crc ^ 1
    )  # who changes a row changes it before it is sent
    if is_early:
        crc_now = crc if fault.startswith("gone") else before
        world.scans[first].append((one, crc_now, state, created_ms))
        world.rows[one] = Row(crc_now, created_ms, state, is_gone=state != "sent")
    if fault.startswith("gone") and is_early:
        return
    seen_again = 2 if fault == "waiting" or not is_early else draw.randint(first + 1, 2)
    last = "live" if fault == "waiting" else "sent"
    for number in range(first + 1, seen_again) if is_early and state != "sent" else ():
        world.scans[number].append((one, before, state, created_ms))
    if not is_early or (crc, last) != (
        before,
        state,
    ):  # what is sent, and as it was, is written once
        world.scans[seen_again].append((one, crc, last, created_ms))
    world.rows[one] = Row(crc, created_ms, last)
    if fault == "read again" and seen_again == 1:
        world.scans[2].append((one, crc ^ 1, "sent", created_ms))
        world.rows[one] = Row(crc ^ 1, created_ms)


def looked_at(world: World, window: Window, kept: Kept) -> set[tuple[str, Id]]:
    """What is found by a look at every row: reason and id."""
    return {
        *_by_rows(world, window),
        *_by_messages(world, window, kept),
        *_waiting_long(world, window),
    }


def _by_rows(world: World, window: Window) -> Iterator[tuple[str, Id]]:
    committed = {one: row for one, row in world.rows.items() if window.is_judged(row.created_ms)}
    scheduled = {one: (crc, now_ms) for one, crc, _, now_ms in world.scheduled}
    first_ms: dict[Id, int] = {}
    for one, crc, stored_ms, _ in world.stored:
        first_ms[one] = min(stored_ms, first_ms.get(one, stored_ms))
        if one in committed and committed[one].crc != crc:
            yield "unlike", one
    for one, row in committed.items():
        is_known = one in first_ms or one in scheduled or one in world.cancelled
        is_settled = row.state == "sent" or row.is_gone
        if not is_known and (is_settled or NEXT_MS - row.created_ms > LATE_MS):
            yield "unstored", one
        if one in scheduled and scheduled[one][0] != row.crc:
            yield "unlike", one
        wanted_ms = max(row.created_ms, scheduled[one][1] if one in scheduled else 0)
        if one in first_ms and first_ms[one] - wanted_ms > LATE_MS:
            yield "late", one


def _by_messages(world: World, window: Window, kept: Kept) -> Iterator[tuple[str, Id]]:
    judged = [row for row in world.stored if window.is_judged(row[2])]
    copies = Counter(row[0] for row in judged)
    scheduled = {one: crc for one, crc, _, _ in world.scheduled}
    producers = set(kept.producers.tolist())
    for one, crc, stored_ms, _ in judged:
        is_kept = one[0] in producers and stored_ms * 1000 >= kept.first_us
        if one not in world.rows and (kept.is_closed_world or is_kept):
            yield "ghost", one
        if copies[one] > 1:
            yield "copied", one
        if scheduled.get(one, crc) != crc:
            yield "released otherwise", one
        if one in world.cancelled:
            yield "revived", one


def _waiting_long(world: World, window: Window) -> Iterator[tuple[str, Id]]:
    done = {row[0] for row in world.stored} | world.cancelled
    for one, due_ms in {one: now_ms for one, _, _, now_ms in world.scheduled}.items():
        if one not in done and window.is_judged(due_ms) and NEXT_MS - due_ms > LATE_MS:
            yield "overdue", one


@pytest.mark.parametrize("seed", range(60))
def test_P4_every_finding_is_in_a_word_that_is_looked_at_and_totals_are_exact(seed: int) -> None:
    _check_world(seed)


def test_P4_in_a_world_that_nobody_has_seen_before_it_is_the_same() -> None:
    seed = secrets.randbits(40)
    print(f"the world of seed {seed}")
    _check_world(seed)


def _check_world(seed: int) -> None:
    world, draw = planted(seed), random.Random(seed)
    first_ms, gaps = draw.choice((0, 3_000_000)), draw.choice(((), (GAP,)))
    window = Window(
        first_ms=first_ms,
        next_ms=NEXT_MS,
        gaps=gaps,
        is_log_known=True,
        is_folded=True,
        kept=(),
        coverage=(),
    )
    words = world.words(window)
    known = np.unique(np.array([one[0] for one in world.rows], np.int64))
    kept = Kept(is_closed_world=draw.random() < 0.3, producers=known, first_us=1_000_000_000)
    doubts = words.suspects(kept, late_us=LATE_MS * 1000, can_ghosts_be_told=True)
    assert set(doubts) == set(REASONS)
    places = _places(words)
    found = looked_at(world, window, kept)
    missed = {
        (reason, one) for reason, one in found if not doubts[reason][places[one[0], one[1] >> 6]]
    }
    assert missed == set(), seed
    committed, is_cut = words.committed()
    in_cut = [one for one in world.rows if is_cut[places[one[0], one[1] >> 6]]]
    committed += sum(window.is_judged(world.rows[one].created_ms) for one in in_cut)
    assert committed == sum(window.is_judged(row.created_ms) for row in world.rows.values())
    stored, foreign, is_cut = words.stored(known)
    judged = [row[0] for row in world.stored if window.is_judged(row[2])]
    in_cut = [one for one in judged if is_cut[places[one[0], one[1] >> 6]]]
    assert stored + len(in_cut) == len(judged)
    strangers = set(known.tolist())
    is_foreign = [one[0] not in strangers for one in judged]
    assert foreign + sum(one[0] not in strangers for one in in_cut) == sum(is_foreign)


def _places(words: Words) -> dict[tuple[int, int], int]:
    keys = zip(words.producer.tolist(), words.word.tolist(), strict=True)
    return {key: place for place, key in enumerate(keys)}


def test_P4_of_sound_ids_none_is_looked_at_or_counted_one_by_one() -> None:
    world, next_ms, second_ms = World(), 2_000_000, 1_000
    window = Window(
        first_ms=0,
        next_ms=next_ms,
        gaps=((0, 50),),
        is_log_known=True,
        is_folded=True,
        kept=(),
        coverage=(),
    )
    for number in range(1_000):  # one in a second: an id word is older than a minute
        one, crc, at_ms = (7, number), number * 31, 100 + number * second_ms
        # Open at the first look, sent at the next; the youngest were looked at by the last scan alone.
        if number < 900:
            world.scans[0].append((one, crc, "live", at_ms))
            world.scans[1].append((one, crc, "sent", at_ms))
        else:
            world.scans[2].append((one, crc, "sent", at_ms))
        is_waiting = 512 <= number < 576
        due_ms = 2 * next_ms if is_waiting else 400_000 if 128 <= number < 256 else None
        if due_ms is not None:
            world.scheduled.append((one, crc, due_ms, due_ms))
        if not is_waiting:
            world.stored.append((one, crc, max(at_ms, due_ms or 0) + 5, due_ms))
    words = world.words(window)
    kept = Kept(is_closed_world=True, producers=np.array([7]), first_us=0)
    doubts = words.suspects(kept, late_us=60 * second_ms * 1000, can_ghosts_be_told=True)
    looked = {reason: int(doubt.sum()) for reason, doubt in doubts.items()}
    assert looked == dict.fromkeys(REASONS, 0)
    committed, is_cut = words.committed()
    assert (committed, int(is_cut.sum())) == (1_000, 0)
    stored, foreign, is_cut = words.stored(np.array([7]))
    assert (stored, foreign, int(is_cut.sum())) == (936, 0, 0)


def test_P4_what_no_outbox_knows_is_not_looked_at_where_ghosts_cannot_be_told() -> None:
    world = World(stored=[((3, number), number, 500, None) for number in range(100)])
    window = Window(
        first_ms=0,
        next_ms=NEXT_MS,
        gaps=(),
        is_log_known=True,
        is_folded=True,
        kept=(),
        coverage=(),
    )
    words = world.words(window)
    kept = Kept(is_closed_world=False, producers=np.empty(0, np.int64), first_us=0)
    for can_ghosts_be_told in (False, True):
        doubts = words.suspects(kept, late_us=LATE_MS * 1000, can_ghosts_be_told=can_ghosts_be_told)
        assert not any(doubt.any() for doubt in doubts.values())
    assert words.stored(np.empty(0, np.int64))[:2] == (100, 100)
