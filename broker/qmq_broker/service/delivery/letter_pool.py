"""The buffer pool of dead letters: keeps the recently used blocks of all groups in memory.

A block is used when it is read or changed. Beyond the limit, the least recently used blocks are
paged out, each to a separate file; a block that did not change since it was read only drops its
bytes. If the disk is full, changed blocks stay in memory and are counted, so that finally groups
get no new messages (`budget.py`).
"""

from __future__ import annotations

from typing import Final

from qmq_broker.errors import DiskError, NoRoomError
from qmq_broker.storage.files.letters import LetterFiles
from qmq_broker.storage.refusals import Refusals
from qmq_client.group.dead_letters import Block, Page

#: Blocks paged out in one step: some ten milliseconds.
_PAGED_OUT_MAX: Final = 32
#: Blocks freed in one step: some milliseconds for full ones in memory.
_FREED_MAX: Final = 64


class LetterPool:
    """Belongs to the loop thread."""

    def __init__(self, files: LetterFiles, refusals: Refusals, *, bytes_max: int) -> None:
        self._files, self._refusals = files, refusals
        #: Limit of the memory of all blocks.
        self.bytes_max = bytes_max
        #: Blocks in memory with their counted bytes, the most recently used one last.
        self._blocks: dict[Block, int] = {}
        #: The memory of all of them.
        self.memory_bytes = 0
        #: Unused blocks, to be freed.
        self._forgotten: list[Block] = []
        #: Whether no page is written before the next step, because the disk is full or there are many.
        self._is_waiting = False
        self._is_held = False

    @property
    def file_bytes(self) -> int:
        """Length of the files of the blocks that are paged out."""
        return self._files.length_bytes

    def used(self, block: Block) -> None:
        """Record that this block was just read or changed; others may be paged out for it."""
        self._drop(block)
        self._blocks[block] = block.memory_bytes
        self.memory_bytes += block.memory_bytes
        if not self._is_held:
            self._page_out()

    def hold(self) -> None:
        """Page out nothing until `release`: blocks that were read for a change stay in memory."""
        self._is_held = True

    def release(self) -> None:
        """End `hold`, and page out blocks beyond the limit."""
        self._is_held = False
        self._page_out()

    def forget(self, block: Block) -> None:
        """Record that this block is no longer used; a later step frees it."""
        self._drop(block)
        self._forgotten.append(block)

    def step(self) -> None:
        """Free some unused blocks and their files, and allow page-outs again after the disk was full."""
        del self._forgotten[-_FREED_MAX:]
        self._files.step()
        self._is_waiting = False
        self._page_out()

    @property
    def _is_over(self) -> bool:
        """Whether the memory is over the limit; the most recently used block stays."""
        return self.memory_bytes > self.bytes_max and len(self._blocks) > 1

    def _page_out(self) -> None:
        for _ in range(
            min(_PAGED_OUT_MAX, len(self._blocks) - 1)
        ):  # the most recently used one stays
            if not self._is_over:
                return
            self._page_out_one()
        self._is_waiting = self._is_waiting or self._is_over

    def _page_out_one(self) -> None:
        block = next(iter(self._blocks))
        page = block.page or self._written(block)
        if page is None:  # later blocks may need no room
            self._blocks[block] = self._blocks.pop(block)
            return
        block.page_out(page)
        self._drop(block)

    def _drop(self, block: Block) -> None:
        self.memory_bytes -= self._blocks.pop(block, 0)

    def _written(self, block: Block) -> Page | None:
        """A page with this block; None if none is written now."""
        if self._is_waiting:
            return None
        try:
            return self._files.write(block.content().read())
        except (NoRoomError, DiskError) as error:
            self._refusals.note("pages_of_dead_letters", error)
            self._is_waiting = True
            return None
