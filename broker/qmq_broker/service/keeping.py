"""Reports and status of keepers. The writer makes the changes, between two commits.

The writer also deletes segments, so it deletes none that a confirmed keeper still needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from qmq_broker.errors import NotFoundError
from qmq_broker.service.writer import CommitWriter
from qmq_broker.storage.files.keepers import Keeper
from qmq_broker.storage.keepers import LogOffsets, lost_bytes
from qmq_broker.storage.store import Store
from qmq_client.wire.errors import InvalidMessageError

_log = logging.getLogger(__name__)
#: Called in the loop thread with the durable new state of the keeper, or with the error if nothing was done.
OnKept = Callable[[Keeper | Exception], None]


class KeeperStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a keeper."""

    name: str
    #: The commit log below this offset is archived …
    kept_offset: int
    #: … and the action log below this one.
    kept_actions_offset: int
    #: Time since its last report.
    age_s: float
    #: Bytes of each log that are durable but not archived yet. A segment is archived when it is full.
    lag_bytes: int
    lag_actions_bytes: int
    #: Bytes of the commit log that retention would delete by age or length if it did not wait for
    #: this keeper; groups may need them too.
    held_bytes: int
    #: Bytes that were deleted by force before they were archived; in the action log also for lack of disk space.
    lost_bytes: int
    lost_actions_bytes: int


class Keeping:
    """The keepers of one broker; belongs to the loop thread."""

    def __init__(self, store: Store, writer: CommitWriter) -> None:
        self._store = store
        self._writer = writer
        #: The losses of each keeper at the last check.
        self._lost = {keeper.name: self._lost_by(keeper) for keeper in store.keepers.all}

    def statuses(self, now_ms: int) -> list[KeeperStatus]:
        """Every keeper, by name."""
        keepers = self._store.keepers.all
        old_offset = self._store.retention.old_offset(now_ms) if keepers else 0
        return [self._status(keeper, old_offset, now_ms) for keeper in keepers]

    def status(self, keeper: Keeper, now_ms: int) -> KeeperStatus:
        """The status of one keeper."""
        return self._status(keeper, self._store.retention.old_offset(now_ms), now_ms)

    def keep(self, name: str, reported: LogOffsets, now_ms: int, on_done: OnKept) -> None:
        """Make retention wait for this keeper beyond its reported offsets; see `Keepers.keep`."""
        self._run(lambda: self._store.keep(name, reported, now_ms), on_done)

    def end(self, name: str, on_done: OnKept) -> None:
        """Stop waiting for this keeper; `NotFoundError` if there is none of this name."""

        def end() -> Keeper:
            keeper = self._store.end_keeper(name)
            if keeper is None:
                raise NotFoundError(
                    f"there is no keeper {name}",
                    field="name",
                    value=name,
                    remedy="`qmq broker keepers` lists them.",
                )
            return keeper

        self._run(end, on_done)

    def log_losses(self) -> int:
        """Log bytes that were deleted before a keeper had them; returns how many keepers are concerned."""
        count = 0
        for keeper in self._store.keepers.all:
            lost, before = self._lost_by(keeper), self._lost.get(keeper.name, LogOffsets(0, 0))
            more = [max(0, now - then) for now, then in zip(lost, before, strict=True)]
            if any(more):
                count += 1
                _log.warning(
                    "given up before it was kept: keeper=%s bytes=%d actions_bytes=%d",
                    keeper.name,
                    *more,
                )
            self._lost[keeper.name] = lost
        return count

    def _lost_by(self, keeper: Keeper) -> LogOffsets:
        store = self._store
        return lost_bytes(keeper, LogOffsets(store.first_offset, store.actions.first_offset))

    def _status(self, keeper: Keeper, old_offset: int, now_ms: int) -> KeeperStatus:
        store, lost = self._store, self._lost_by(keeper)
        first_offset = max(keeper.kept_offset, store.first_offset)
        first_action = max(keeper.kept_actions_offset, store.actions.first_offset)
        return KeeperStatus(
            name=keeper.name,
            kept_offset=keeper.kept_offset,
            kept_actions_offset=keeper.kept_actions_offset,
            age_s=max(0, now_ms - keeper.reported_at_ms) / 1000,
            lag_bytes=max(0, store.durable_offset - first_offset),
            lag_actions_bytes=max(0, store.actions.log.durable_offset - first_action),
            held_bytes=max(0, old_offset - first_offset),
            lost_bytes=lost.commit,
            lost_actions_bytes=lost.actions,
        )

    def _run(self, change: Callable[[], Keeper], on_done: OnKept) -> None:
        """Let the writer make the change; a refusal does not poison the store."""
        self._writer.change(change, on_done, refusals=(InvalidMessageError, NotFoundError))
