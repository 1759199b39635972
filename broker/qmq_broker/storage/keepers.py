"""Keepers: applications that archive the logs. No segment is deleted before every keeper has it.

A keeper is a name with an offset in each log. Its offsets only move forward, never beyond the
durable end, and survive restarts. Losses by forced retention are not counted at that moment,
because a crash could come in between. Instead the loss is the distance from the keeper's offset to
the beginning of the log, and is added up when the keeper moves past it.

The action log waits for keepers only while the disk is above its reserve. Below it, pulls and acks
continue and need the room.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from qmq_broker.options import StoreOptions
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.keepers import Keeper, read_keepers, write_keepers
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.shown import shorten

_log = logging.getLogger(__name__)
#: Each may fill the disk. An archive, a second archive and a mirror make three.
KEEPERS_MAX: Final = 16
#: The limit without keepers.
NO_BOUND: Final = 2**63 - 1


class LogOffsets(NamedTuple):
    """An offset in each log."""

    commit: int
    actions: int


class Keepers:
    """The keepers of one store. Changed by the writer thread, read by any."""

    def __init__(self, disk: Disk, options: StoreOptions, store_id: bytes) -> None:
        """Read the keepers from the disk; raises `CorruptionError` if the file is damaged."""
        self._disk = disk
        self._options = options
        self._store_id = store_id
        self._by_name = {keeper.name: keeper for keeper in read_keepers(disk, store_id)}
        #: Held while a keeper is added, and while actions are deleted.
        self._lock = threading.Lock()

    @property
    def all(self) -> tuple[Keeper, ...]:
        """Every keeper, by name."""
        by_name = self._by_name
        return tuple(by_name[name] for name in sorted(by_name))

    @property
    def needed(self) -> LogOffsets:
        """The offsets that retention may not pass; `NO_BOUND` without keepers."""
        keepers = () if self._options.force_retention else self.all
        return LogOffsets(
            min((one.kept_offset for one in keepers), default=NO_BOUND),
            min((one.kept_actions_offset for one in keepers), default=NO_BOUND),
        )

    @contextmanager
    def given_up_actions(self) -> Iterator[int]:
        """The offset below which keepers allow the action log to be deleted.

        No keeper can be added while this is entered.
        """
        has_room = self._disk.free_bytes() >= self._options.reserve_bytes
        with self._lock:
            yield self.needed.actions if has_room else NO_BOUND

    def limit(self, end: LogOffsets) -> int:
        """Move back keepers that are ahead of the ends of the logs, durably; returns how many.

        They archived a log that differs from this one, such as this one before a backup was
        restored. Frames after the end are new to them.
        """
        ahead: dict[str, Keeper] = {}
        for one in self.all:
            if (limited := limited_to(end, one)) != one:
                _log.warning(
                    "keeper ahead of the log: keeper=%s end=%d actions_end=%d", one.name, *end
                )
                ahead[one.name] = limited
        if ahead:
            self._replace(self._by_name | ahead, self._by_name)
        return len(ahead)

    def keep(
        self,
        name: str,
        reported: LogOffsets,
        at_ms: int,
        *,
        first: Callable[[], LogOffsets],
        durable: LogOffsets,
    ) -> Keeper:
        """Make retention wait for this keeper beyond its reported offsets; durable on return.

        A new keeper starts at least at `first`, where the logs begin; a lower report, from a keeper
        without a part of the log, means that offset. Raises `InvalidMessageError` if it moves back,
        claims more than is `durable`, or is one too many, and `NoRoomError`; in both cases nothing
        changes.
        """
        before = self._by_name
        known = before.get(name)
        if known is not None:
            reported = _at_least(reported, known)
        self._check(name, known, reported, durable)
        draft = known or Keeper(name, reported.commit, reported.actions, at_ms)
        with self._lock:  # from here on, nothing above is deleted
            self._by_name = {**before, name: draft}
        begins = first()
        keeper = _begun(draft, begins) if known is None else _moved(known, reported, at_ms, begins)
        self._replace({**before, name: keeper}, before)
        return keeper

    def end(self, name: str) -> Keeper | None:
        """Stop waiting for this keeper; durable on return.

        Returns its last state, or None if there was none.
        """
        before = self._by_name
        keeper = before.get(name)
        if keeper is not None:
            self._replace({key: one for key, one in before.items() if key != name}, before)
        return keeper

    def _replace(self, by_name: dict[str, Keeper], before: dict[str, Keeper]) -> None:
        ordered = tuple(by_name[name] for name in sorted(by_name))
        try:
            write_keepers(self._disk, self._store_id, ordered)
        except BaseException:
            self._by_name = before
            raise
        self._by_name = by_name

    def _check(
        self, name: str, known: Keeper | None, reported: LogOffsets, durable: LogOffsets
    ) -> None:
        if known is None and len(self._by_name) >= KEEPERS_MAX:
            raise _refused(
                "name",
                f"{KEEPERS_MAX} keepers",
                shorten(name),
                "Remove one that is no longer run: qmq broker keepers, then "
                "qmq broker remove-keeper NAME.",
            )
        before = (0, 0) if known is None else (known.kept_offset, known.kept_actions_offset)
        fields = ("kept_offset", "kept_actions_offset")
        for field, value, low, high in zip(fields, reported, before, durable, strict=True):
            if value > high:
                raise _refused(
                    field,
                    f"up to {high}, where this log ends",
                    str(value),
                    "The archive is of another log, or of this one before it was restored from a "
                    "backup: begin a new archive under a new name.",
                )
            if value < low:
                raise _refused(
                    field,
                    f"at least {low}, which keeper {name} has reported before",
                    str(value),
                    "Two archives may not have the same name: give this one another name (--keeper), or remove "
                    f"the keeper (qmq broker remove-keeper {name}) when the other one is gone.",
                )


def limited_to(end: LogOffsets, keeper: Keeper) -> Keeper:
    """The keeper with its offsets limited to the ends of the logs."""
    return msgspec.structs.replace(
        keeper,
        kept_offset=min(keeper.kept_offset, end.commit),
        kept_actions_offset=min(keeper.kept_actions_offset, end.actions),
        first_offset=min(keeper.first_offset, end.commit),
        first_actions_offset=min(keeper.first_actions_offset, end.actions),
    )


def _at_least(reported: LogOffsets, keeper: Keeper) -> LogOffsets:
    """The offsets of a keeper that has no part of a log yet."""
    firsts = (keeper.first_offset, keeper.first_actions_offset)
    return LogOffsets(*map(max, reported, firsts))


def _begun(draft: Keeper, begins: LogOffsets) -> Keeper:
    """A new keeper for logs that begin at these offsets."""
    return msgspec.structs.replace(
        draft,
        kept_offset=max(draft.kept_offset, begins.commit),
        kept_actions_offset=max(draft.kept_actions_offset, begins.actions),
        first_offset=begins.commit,
        first_actions_offset=begins.actions,
    )


def _moved(known: Keeper, reported: LogOffsets, at_ms: int, begins: LogOffsets) -> Keeper:
    """The keeper at these offsets; bytes that were deleted before it had them are added to its losses."""
    lost = lost_bytes(known, begins)
    return msgspec.structs.replace(
        known,
        kept_offset=reported.commit,
        kept_actions_offset=reported.actions,
        reported_at_ms=at_ms,
        lost_bytes=lost.commit if reported.commit >= begins.commit else known.lost_bytes,
        lost_actions_bytes=(
            lost.actions if reported.actions >= begins.actions else known.lost_actions_bytes
        ),
    )


def lost_bytes(keeper: Keeper, first: LogOffsets) -> LogOffsets:
    """Bytes of each log that were deleted before this keeper had them; the logs begin at `first`."""
    return LogOffsets(
        keeper.lost_bytes + max(0, first.commit - keeper.kept_offset),
        keeper.lost_actions_bytes + max(0, first.actions - keeper.kept_actions_offset),
    )


def _refused(field: str, limit: str, value: str, remedy: str) -> InvalidMessageError:
    return InvalidMessageError(field=field, limit=limit, value=value, remedy=remedy)
