"""Changes of groups by operators: pause, resume, seek, configure and remove groups; replay and purge dead letters.

Each change is one action of the log, so it survives a restart. Requests are bounded; the answer
says if a part is left to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from qmq_broker.errors import BusyError, no_group
from qmq_broker.service.delivery.bodies import group_queue, read_messages
from qmq_broker.service.delivery.checks import check_attempts, check_backoff, check_tags
from qmq_broker.service.delivery.delivery import Delivery
from qmq_broker.service.delivery.registry import Group, position_of
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.store import Store
from qmq_client.group.actions import (
    Action,
    Configured,
    GroupDefined,
    Paused,
    Purged,
    Replayed,
    Sought,
)
from qmq_client.group.key_queues import key_number
from qmq_client.group.queue import Entry
from qmq_client.group.settings import backoff_kept, tags_kept
from qmq_client.group.state import GroupState
from qmq_client.wire.operations import ConfigureRequest, DeadAnswer, DeadRequest
from qmq_client.wire.record import record_key
from qmq_client.wire.start import Start

#: Dead letters replayed by one action; of an ordered group with their keys.
_REPLAYED_AT_ONCE = 256
#: Bytes of messages of an ordered group that one request replays; they are read to get their keys.
_REPLAYED_BYTES = 16 * 1024 * 1024


class Changes:
    """Changes to the groups of one broker; belongs to the loop thread."""

    def __init__(self, store: Store, delivery: Delivery, limits: ServiceLimits) -> None:
        self._store = store
        self._delivery = delivery
        self._limits = limits

    def pause(self, subject: str, name: str, now_ms: int, *, is_paused: bool) -> bool:
        """Pause or resume the group; returns whether that was a change."""
        group = self._group(subject, name)
        if group.state.is_paused is is_paused:
            return False
        self._write(group, [Paused(now_ms, subject, name, is_paused)], now_ms)
        return True

    def seek(self, subject: str, name: str, start: Start, now_ms: int) -> int:
        """Move the group to this position; returns its sequence."""
        group = self._group(subject, name)
        sequence = position_of(self._store, subject, start)
        # The group skips messages deleted by force now, because they could not be counted later.
        self._delivery.skip_what_is_gone(group, now_ms)
        self._write(group, [Sought(now_ms, subject, name, sequence)], now_ms)
        return sequence

    def configure(self, request: ConfigureRequest, now_ms: int) -> None:
        """Change settings; settings that are not named stay the same."""
        check_tags(request.tags, self._limits)
        check_attempts(request.max_attempts, self._limits)
        check_backoff(request.backoff, self._limits)
        group = self._group(request.subject, request.group)
        state = group.state
        settings = state.settings
        if request.tags is not UNSET:
            any_tags, all_tags = tags_kept(request.tags)
            settings = msgspec.structs.replace(settings, any_tags=any_tags, all_tags=all_tags)
        if request.backoff is not UNSET:
            backoff = backoff_kept(request.backoff)
            settings = msgspec.structs.replace(settings, backoff=backoff)
        where = (now_ms, state.subject, state.group)
        actions: list[Action] = []
        if settings != state.settings:
            actions.append(Configured(*where, settings))
        if request.max_attempts is not UNSET:
            actions.append(GroupDefined(*where, state.cursor, request.max_attempts))
        self._write(group, actions, now_ms)

    def remove(self, subject: str, name: str, now_ms: int) -> None:
        """Forget the group and its dead letters; a consumer that pulls for it creates it again."""
        self._delivery.registry.end(self._group(subject, name), now_ms)

    def replay(self, request: DeadRequest, now_ms: int) -> DeadAnswer:
        """Deliver dead letters again, to their group only, as if for the first time."""
        return self.replay_some(request, now_ms, self._limits.dead_letters_per_request)[0]

    def replay_some(
        self, request: DeadRequest, now_ms: int, count_max: int
    ) -> tuple[DeadAnswer, int | None]:
        """Replay at most `count_max`; also returns the sequence to continue at, or None if none is left."""
        state = self._group(request.subject, request.group).state
        there = max(request.first, self._first_there(state))
        # Letters without a message stay: if they counted against the limit of a request, no request
        # would get past them.
        passed = state.dead.count(request.first, min(there, request.next))
        request = msgspec.structs.replace(request, first=there)
        group, sequences, is_cut = self._dead(request, count_max)
        present, gone, has_rest = self._present(state, sequences)
        room = self._limits.unsettled_per_group - state.unsettled
        if present and room <= 0:
            raise BusyError(
                f"group {state.group} has {state.unsettled} unsettled messages; "
                f"allowed: {self._limits.unsettled_per_group}",
                retry_after_s=5.0,
                field="unsettled messages of a group",
                limit=str(self._limits.unsettled_per_group),
                value=str(state.unsettled),
                remedy="Let its consumers settle some, then replay the others.",
            )
        is_stopped = has_rest or len(present) > room
        actions: list[Action] = []
        for first, next_ in _runs(present[: max(0, room)]):
            keys = () if state.by_key is None else self._keys(state, first, next_)
            actions.append(Replayed(now_ms, state.subject, state.group, first, next_, keys))
        self._write(group, actions, now_ms)
        count = min(len(present), room)
        answer = DeadAnswer(count=count, gone=passed + gone, has_more=is_cut or is_stopped)
        return answer, sequences[-1] + 1 if is_cut and not is_stopped else None

    def purge(self, request: DeadRequest, now_ms: int) -> DeadAnswer:
        """Forget dead letters."""
        return self.purge_some(request, now_ms, self._limits.dead_letters_per_request)

    def purge_some(self, request: DeadRequest, now_ms: int, count_max: int) -> DeadAnswer:
        """Like `purge`, with a limit."""
        group, sequences, has_more = self._dead(request, count_max)
        if sequences:
            first, next_ = sequences[0], sequences[-1] + 1
            where = (now_ms, request.subject, request.group)
            self._write(group, [Purged(*where, first, next_)], now_ms)
        return DeadAnswer(count=len(sequences), has_more=has_more)

    def _group(self, subject: str, name: str) -> Group:
        group = self._delivery.registry.find(subject, name)
        if group is None:
            raise no_group(name, subject)
        return group

    def _dead(self, request: DeadRequest, limit: int) -> tuple[Group, list[int], bool]:
        group = self._group(request.subject, request.group)
        sequences = group.state.dead_between(request.first, request.next, limit + 1)
        return group, sequences[:limit], len(sequences) > limit

    def _first_there(self, state: GroupState) -> int:
        """The lowest sequence whose message may exist and is not about to be deleted; lower if the group has copies."""
        queue = self._store.queue(state.subject)
        if queue is None or state.long_retries.copies:
            return 0
        return queue.sequence_at(self._store.retention.spared_offset)

    def _present(self, state: GroupState, sequences: Sequence[int]) -> tuple[list[int], int, bool]:
        """The letters whose messages exist and stay, the number of the others, and whether some are left for later."""
        queue, spared_offset = group_queue(self._store, state), self._store.retention.spared_offset
        if queue is None:
            return [], len(sequences), False
        present: list[int] = []
        room_bytes = _REPLAYED_BYTES
        for index, sequence in enumerate(sequences):
            entries = queue.entries(sequence, 1)
            if not _stays(entries, spared_offset):
                continue
            room_bytes -= 0 if state.by_key is None else entries[0].record_bytes
            if room_bytes < 0 and present:
                return present, index - len(present), True
            present.append(sequence)
        return present, len(sequences) - len(present), False

    def _keys(self, state: GroupState, first: int, next_: int) -> tuple[int, ...]:
        """The numbers of these messages' keys. Requires: the messages exist."""
        queue = group_queue(self._store, state)
        assert queue is not None
        entries = [entry for n in range(first, next_) for entry in queue.entries(n, 1)]
        records = read_messages(self._store, state, entries)
        return tuple(key_number(record_key(record)) for record in records)

    def _write(self, group: Group, actions: Sequence[Action], now_ms: int) -> None:
        self._delivery.journal.write(actions, group.state)
        self._delivery.after_change(group, now_ms)


def _stays(entries: Sequence[Entry], spared_offset: int) -> bool:
    """Whether the message of the first of these exists, and retention is not about to delete it."""
    if not entries:
        return False
    return bool(entries[0].record_bytes) and entries[0].physical_offset >= spared_offset


def _runs(sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive sequences as half open ranges of bounded length."""
    runs: list[tuple[int, int]] = []
    for sequence in sequences:
        first, next_ = runs[-1] if runs else (0, -1)
        if sequence == next_ and next_ - first < _REPLAYED_AT_ONCE:
            runs[-1] = (first, next_ + 1)
        else:
            runs.append((sequence, sequence + 1))
    return runs
