"""Which messages match a group's tags.

First the tag hash of the consume queue entry is checked, then, if it passes, the text. The hash
rejects only what cannot match, so most messages for others are never read.
"""

from __future__ import annotations

from qmq_client.group.actions import GroupSettings
from qmq_client.wire.record import tag_hash
from qmq_client.wire.record_parts import record_tags


class TagFilter:
    """The filter of one group; knows no state."""

    __slots__ = ("_all_bits", "_all_tags", "_any_bits", "_any_tags")

    def __init__(self, any_tags: tuple[str, ...], all_tags: tuple[str, ...]) -> None:
        """Requires: at least one tag."""
        self._any_tags = frozenset(tag.encode() for tag in any_tags)
        self._all_tags = frozenset(tag.encode() for tag in all_tags)
        self._any_bits = tuple(tag_hash([tag]) for tag in self._any_tags)
        self._all_bits = tag_hash(self._all_tags)

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
