"""What a power cut leaves of a disk: the outcomes of everything that was not synced.

The model is told in `recording_disk.py`. `cut_states` gives the regular outcomes of one moment and some
random ones, each state once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tests.crash.image import CutOutcome, Image, Inode, Moment

#: Written as a whole or not at all.
SECTOR_BYTES = 512


class Lost:
    """Nothing that was not synced reached the disk."""

    is_rare = False

    def keeps_name(self, path: str) -> bool:
        return False

    def content(self, inode: Inode) -> bytes:
        return inode.durable


class Kept(Lost):
    """All of it reached the disk."""

    def keeps_name(self, path: str) -> bool:
        return True

    def content(self, inode: Inode) -> bytes:
        return inode.newest


class NamesOnly(Kept):
    """Names reached the disk, content did not."""

    def content(self, inode: Inode) -> bytes:
        return inode.durable


class LastName(Kept):
    """Of the names only the last change reached the disk: nothing says that the earlier ones came first."""

    is_rare = True

    def __init__(self, names: int) -> None:
        self._names_left = names

    def keeps_name(self, path: str) -> bool:
        self._names_left -= 1
        return not self._names_left


class ContentOnly(Lost):
    """Content reached the disk, names did not."""

    def content(self, inode: Inode) -> bytes:
        return inode.newest


class Grown(Kept):
    """Lengths reached the disk, content did not: zeros, or what lay there before."""

    def __init__(self, rng: random.Random, *, is_garbage: bool) -> None:
        self._rng = rng
        self._is_garbage = is_garbage

    def content(self, inode: Inode) -> bytes:
        count = len(inode.newest) - len(inode.durable)
        if count <= 0:
            return inode.durable
        return inode.durable + (self._rng.randbytes(count) if self._is_garbage else bytes(count))


class Torn(Kept):
    """All reached the disk but the last operation on each file, of which some sectors did."""

    is_rare = True

    def __init__(self, first_sectors: int, *, is_reversed: bool = False) -> None:
        self._first_sectors = first_sectors
        self._is_reversed = is_reversed

    def content(self, inode: Inode) -> bytes:
        if not inode.versions:
            return inode.durable
        before = inode.versions[-2] if len(inode.versions) > 1 else inode.durable
        changed = _changed_sectors(before, inode.newest)
        if self._is_reversed:
            changed.reverse()
        chosen = set(changed[: self._first_sectors])
        return _mixed(inode.newest, lambda sector: inode.newest if sector in chosen else before)


class Scattered(Lost):
    """Each sector and each name has an outcome of its own."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._chance = rng.choice((0.1, 0.5, 0.9))

    def keeps_name(self, path: str) -> bool:
        return self._rng.random() < self._chance

    def content(self, inode: Inode) -> bytes:
        if not inode.versions:
            return inode.durable
        states = [inode.durable, *inode.versions]
        length = max(len(self._rng.choice(states)), len(inode.durable))
        if len(inode.newest) < len(inode.durable):
            length = len(self._rng.choice(states))

        def state(_: int) -> bytes:
            if self._rng.random() < self._chance:
                return states[-1]
            return self._rng.choice(states)

        return _mixed(bytes(length), state)


def cut_states(
    image: Image,
    rng: random.Random,
    *,
    scattered: int,
    is_wanted: Callable[[int, CutOutcome], bool] | None = None,
) -> Iterator[Image]:
    """What a power cut at this moment may leave; each state once, by its signature.

    `is_wanted` is asked for each signature instead, where states of other moments are known too.
    """
    seen: set[int] = set()
    moment = Moment(image)
    for outcome in _outcomes(image, moment, rng, scattered):
        cut = moment.after_cut(outcome)
        if is_wanted is not None:
            if is_wanted(cut.signature, outcome):
                yield cut.image()
        elif cut.signature not in seen:
            seen.add(cut.signature)
            yield cut.image()


def _outcomes(
    image: Image, moment: Moment, rng: random.Random, scattered: int
) -> Iterator[CutOutcome]:
    has_content = moment.has_unsynced_content()
    yield Lost()
    if has_content or image.pending_names:
        yield from (Kept(), NamesOnly(), ContentOnly())
        yield from (Scattered(rng) for _ in range(scattered))
    if len(image.pending_names) > 1:
        yield LastName(len(image.pending_names))
    if has_content:
        yield from (Grown(rng, is_garbage=False), Grown(rng, is_garbage=True))
        yield from (Torn(count) for count in range(1, 4))
        yield Torn(1, is_reversed=True)


def _changed_sectors(before: bytes, after: bytes) -> list[int]:
    count = -(-max(len(before), len(after)) // SECTOR_BYTES)
    return [sector for sector in range(count) if _sector(before, sector) != _sector(after, sector)]


def _sector(content: bytes, sector: int) -> bytes:
    return content[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES]


def _mixed(shape: bytes, state: Callable[[int], bytes]) -> bytes:
    parts = []
    for first in range(0, len(shape), SECTOR_BYTES):
        count = min(SECTOR_BYTES, len(shape) - first)
        content = _sector(state(first // SECTOR_BYTES), first // SECTOR_BYTES)
        parts.append(content[:count].ljust(count, b"\0"))
    return b"".join(parts)
