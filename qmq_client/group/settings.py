"""The settings of a group, their comparison with a pull, and the filter by tags.

Tags and order belong to the group: consumers with different ones would lose each other's messages,
so a pull with other ones is refused. The number of attempts and the backoff belong to the group
too, but the latest pull sets them.

A filter first checks the tag hash of the consume queue entry, and then, if it passes, the tags. The
hash rejects only messages that cannot match, so most messages for others are never read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from qmq_client.group.actions import BackoffTerms, GroupSettings
from qmq_client.wire.backoff import ExponentialBackoff
from qmq_client.wire.record import tag_hash
from qmq_client.wire.record_parts import record_tags
from qmq_client.wire.requests import Backoff, PullRequest, Tags


class TagFilter:
    """The filter of one group, without state."""

    __slots__ = ("_all_bits", "_all_tags", "_any_bits", "_any_tags", "cost")

    def __init__(self, any_tags: tuple[str, ...], all_tags: tuple[str, ...]) -> None:
        """Requires: at least one tag."""
        self._any_tags = frozenset(tag.encode() for tag in any_tags)
        self._all_tags = frozenset(tag.encode() for tag in all_tags)
        self._any_bits = tuple(tag_hash([tag]) for tag in self._any_tags)
        self._all_bits = tag_hash(self._all_tags)
        #: Cost of `may_match`, as a number of queue entries that are only read.
        self.cost = 1 + len(self._any_bits) // 4

    def may_match(self, hash_: int) -> bool:
        """Whether a message with this tag hash may match."""
        if hash_ & self._all_bits != self._all_bits:
            return False
        return not self._any_bits or any(hash_ & bits == bits for bits in self._any_bits)

    def matches(self, record: bytes) -> bool:
        """Whether this message matches."""
        tags = frozenset(record_tags(record).split(b","))
        if not self._all_tags <= tags:
            return False
        return not self._any_tags or not tags.isdisjoint(self._any_tags)


def filter_of(settings: GroupSettings) -> TagFilter | None:
    """The filter of a group with these settings; None if it gets every message."""
    if not settings.any_tags and not settings.all_tags:
        return None
    return TagFilter(settings.any_tags, settings.all_tags)


class Conflict(NamedTuple):
    """A setting for which a pull and the group have different values."""

    field: str
    has: str
    wanted: str


def settings_of(request: PullRequest, idle_ms: int = 0) -> GroupSettings:
    """The settings of a group that is created by this pull."""
    any_tags, all_tags = tags_kept(request.tags)
    return GroupSettings(
        any_tags=any_tags,
        all_tags=all_tags,
        is_ordered=request.ordered is True,
        backoff=backoff_kept(request.backoff),
        idle_ms=idle_ms,
    )


def conflict_of(has: GroupSettings, request: PullRequest) -> Conflict | None:
    """The conflict of this pull with a group with these settings; None without one."""
    tags = (has.any_tags, has.all_tags)
    if request.tags is not UNSET and (wanted := tags_kept(request.tags)) != tags:
        return Conflict("tags", _tags_text(*tags), _tags_text(*wanted))
    if request.ordered is not UNSET and request.ordered is not has.is_ordered:
        return Conflict("ordered", str(has.is_ordered).lower(), str(request.ordered).lower())
    return None


def tags_kept(tags: Tags | UnsetType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tags of a filter in their stored form, any and all: each once, in order."""
    if tags is UNSET:
        return (), ()
    return tuple(sorted(set(tags.any))), tuple(sorted(set(tags.all)))


def backoff_kept(backoff: Backoff | UnsetType) -> BackoffTerms | None:
    """The backoff of a request in its stored form; None without one."""
    if backoff is UNSET:
        return None
    return BackoffTerms(backoff.first_ms, backoff.factor, backoff.max_ms)


def _tags_text(any_tags: tuple[str, ...], all_tags: tuple[str, ...]) -> str:
    parts = [f"any of {', '.join(any_tags)}"] if any_tags else []
    parts += [f"all of {', '.join(all_tags)}"] if all_tags else []
    return " and ".join(parts) or "no tags"


def backoff_of(settings: GroupSettings, default: ExponentialBackoff) -> ExponentialBackoff:
    """The backoff of a group: its own, or the broker's."""
    own = settings.backoff
    if own is None:
        return default
    return replace(default, first_ms=own.first_ms, factor=own.factor, max_ms=own.max_ms)
