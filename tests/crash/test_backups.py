"""X3: a power cut while a backup is made, with links, beside a store that goes on and gives segments up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from qmq_broker.errors import StoreError
from qmq_broker.storage.files import layout
from qmq_broker.storage.logs.segments import Segments
from qmq_broker.storage.store import Store
from qmq_broker.storage.upkeep import backup
from qmq_broker.storage.upkeep.backup import back_up
from tests.crash.below import Below, disks
from tests.crash.enumeration import CHECKED, SEED, Census, quietly
from tests.crash.promises import check_disk
from tests.crash.recording_disk import Image, PassingDisk, RecordingDisk, images
from tests.crash.world import KEEPERS, RETAINING, BrokenPromiseError, History, World
from tests.kit.clock import FakeClock

SOURCE, COPY = "data", "copy"
LIVES = 3
LIVES_BEFORE_A_RELEASE = 9
#: Of one life.
STATES_MIN = 500
#: Segments are taken whole, so that a full one may be written again.
OPTIONS = replace(RETAINING, growth_bytes=2048)


class Life:
    """A store, a backup of it, and the store again."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.disk = RecordingDisk()
        source, copy = disks(self.disk, SOURCE, COPY)
        assert isinstance(source, Below)
        assert isinstance(copy, Below)
        self._source, self._copy = source, copy
        self.world = World(cast(RecordingDisk, source), history=History(options=OPTIONS))
        self._work(self._rng.randrange(4, 12))
        self.began_at = len(self.disk.operations)
        back_up(source, copy, FakeClock(), link=self._link)
        self.returned_at = len(self.disk.operations)
        self._work(self._rng.randrange(2, 8))

    def _link(self, path: str) -> bool:
        if self._rng.random() < 0.2:
            self._work(1)
        if self._rng.random() < 0.3 or path not in self._there():
            return False
        return self._source.link_to(path, self._copy)

    def _there(self) -> set[str]:
        return {f"{layout.COMMIT_LOG}/{name}" for name in self._source.names(layout.COMMIT_LOG)}

    def _work(self, rounds: int) -> None:
        world, rng = self.world, self._rng
        for _ in range(rounds):
            world.send(world.frame(orders=[rng.randrange(400), 200], invoices=rng.randrange(90)))
            world.act(rng.choice((1, 3, 15)))
            world.clock.pass_ms(1_100)
            world.store.step()
            if rng.random() < 0.3:
                world.give_up()
            if rng.random() < 0.4:
                world.note_groups()
            if rng.random() < 0.3:
                self._keep()

    def _keep(self) -> None:
        """An archive comes, or has all messages and some more of the actions."""
        world = self.world
        world.sync_actions()
        known, end_offset = world.keeper(KEEPERS[0]), world.store.actions.log.durable_offset
        has_none = known is None or known.kept_actions_offset == known.first_actions_offset
        kept_offset = 0 if known is None or has_none else known.kept_actions_offset
        if self._rng.random() < 0.5:
            kept_offset = self._rng.randint(kept_offset, end_offset)
        world.keep(world.store.durable_offset, kept_offset)

    def known_to_copy(self, count: int) -> History:
        """What was acknowledged when the backup began must be in it; the rest may be."""
        known, then = self.world.history.up_to(count), self.world.history.up_to(self.began_at)
        acknowledged = sum(one.acknowledged_at is not None for one in then.sent)
        for one in known.sent[acknowledged:]:
            one.acknowledged_at = None
        known.synced_actions = then.synced_actions
        answered = sum(one.acknowledged_at is not None for one in then.told)
        for told in known.told[answered:]:
            told.acknowledged_at = None
        return known


def crash_everywhere(seed: int, *, one_in: int) -> int:
    """Check source and copy in the crash states or a sample; returns how many different ones there were."""
    rng = random.Random(seed)
    with quietly():
        life = Life(seed)
        census = Census(f"backup, seed {seed}", seed=seed, one_in=one_in)
        for count, image in images(life.disk.first_image, life.disk.operations):
            if count < life.began_at:
                continue
            known = life.world.history.up_to(count)
            for state in census.drawn_cuts(image, known.mark(), rng, scattered=3):
                try:
                    _check_copy(state.copy(), life, count)
                    check_disk(Below(PassingDisk(state), SOURCE), known)
                except BrokenPromiseError as error:
                    raise BrokenPromiseError(f"{census.where}, {count} calls: {error}") from error
    return len(census)


def _check_copy(state: Image, life: Life, count: int) -> None:
    copy = Below(PassingDisk(state), COPY)
    if layout.FORMAT in copy.names(layout.ROOT):
        check_disk(copy, life.known_to_copy(count))
        return
    if count >= life.returned_at:
        raise BrokenPromiseError("X3: a backup that was made is none")
    names = copy.names(layout.ROOT)
    if names not in ([], [layout.LOCK]):
        try:
            Store.open(copy, FakeClock(), OPTIONS)
        except StoreError:
            return
        raise BrokenPromiseError(f"X3: half a backup was opened: {names}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A life goes to one worker."""
    if "life" in metafunc.fixturenames:
        is_release = metafunc.config.getoption("--release")
        metafunc.parametrize("life", range(LIVES_BEFORE_A_RELEASE if is_release else LIVES))


def test_X3_a_power_cut_beside_or_in_a_backup_harms_neither_of_both(
    life: int, one_in: int, count_states: Callable[[int], None]
) -> None:
    states = crash_everywhere(SEED * 100 + life, one_in=one_in)
    count_states(states)
    assert states >= STATES_MIN


def _links_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Segments.adopt

    def adopt_blindly(self: Segments, base: int, head: bytes) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.crash.recording_disk.RecordingFile.links", lambda file: 1)
            return adopt(self, base, head)

    monkeypatch.setattr(Segments, "adopt", adopt_blindly)


def _the_copy_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = RecordingDisk.perform

    def forget(self: RecordingDisk, call: str, path: str, operation: Any) -> None:
        if not (call == "sync" and path.startswith(f"{COPY}/")):
            perform(self, call, path, operation)

    monkeypatch.setattr(RecordingDisk, "perform", forget)


def _actions_for_keepers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup._Backup, "_take_older_actions", lambda self, next_base: None)


@pytest.mark.parametrize(
    "plant",
    [_links_are_written_over, _the_copy_is_not_synced, _actions_for_keepers_are_left_out],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(BrokenPromiseError):
        sum(crash_everywhere(SEED * 100 + n, one_in=CHECKED) for n in range(LIVES_BEFORE_A_RELEASE))
