"""The buffer pool of dead letters: which blocks of them are in memory, over all groups.

A block is used when it is read or changed. Beyond the bound, those that were not used for longest are
paged out to files of their own; one that did not change since it was read just drops its bytes.
Where the disk takes no more, blocks stay in memory and are counted, so that in the end groups get
no new messages (`budget.py`).
"""

from __future__ import annotations

from typing import Final

from qmq_broker.errors import DiskError, NoRoomError
from qmq_broker.storage.files.letters import LetterFiles
from qmq_broker.storage.refusals import Refusals
from qmq_client.group.dead_letters import Block, page_of

#: Blocks paged out in one step after the disk was full: some ten milliseconds.
_PAGED_OUT_MAX: Final = 32


class LetterPool:
    """Belongs to the loop thread."""

    def __init__(self, files: LetterFiles, refusals: Refusals, *, bytes_max: int) -> None:
        self._files, self._refusals = files, refusals
        #: They may take so much.
        self.bytes_max = bytes_max
        #: Blocks in memory with their bytes as they were counted, the one used last at the end.
        self._blocks: dict[Block, int] = {}
        #: What all of them take in memory.
        self.memory_bytes = 0
        #: Whether the disk took no page lately.
        self._is_refused = False

    @property
    def file_bytes(self) -> int:
        """Length of the files of those that are paged out."""
        return self._files.length_bytes

    def used(self, block: Block) -> None:
        """This block was just read or changed; others may be paged out for it."""
        self.forget(block)
        self._blocks[block] = block.memory_bytes
        self.memory_bytes += block.memory_bytes
        while not self._is_refused and self._is_over:
            self._page_out_one()

    def forget(self, block: Block) -> None:
        """This block is not used any more."""
        self.memory_bytes -= self._blocks.pop(block, 0)

    def step(self) -> None:
        """Remove files that are not used any more, and try again where the disk took no page."""
        self._files.step()
        self._is_refused = False
        for _ in range(_PAGED_OUT_MAX):
            if self._is_refused or not self._is_over:
                return
            self._page_out_one()
        self._is_refused = self._is_over  # the rest in later steps, not with the next block

    @property
    def _is_over(self) -> bool:
        """Whether it holds too much; the block that was used last stays."""
        return self.memory_bytes > self.bytes_max and len(self._blocks) > 1

    def _page_out_one(self) -> None:
        block = next(iter(self._blocks))
        try:
            block.page_out(block.page or self._files.write(page_of(block.content())))
        except (NoRoomError, DiskError) as error:
            self._refusals.note("pages_of_dead_letters", error)
            self._is_refused = True
            return
        self.forget(block)
