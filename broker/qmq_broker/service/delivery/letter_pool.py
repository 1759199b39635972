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
from qmq_client.group.dead_letters import Block

#: Blocks paged out in one step: some ten milliseconds.
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
        #: Whether nothing is paged out before the next step: the disk took no page, or there are many.
        self._is_waiting = False
        self._is_held = False

    @property
    def file_bytes(self) -> int:
        """Length of the files of those that are paged out."""
        return self._files.length_bytes

    def used(self, block: Block) -> None:
        """This block was just read or changed; others may be paged out for it."""
        self.forget(block)
        self._blocks[block] = block.memory_bytes
        self.memory_bytes += block.memory_bytes
        if not self._is_held:
            self._page_out()

    def hold(self) -> None:
        """Page out nothing until `release`: what was read for a change stays for it."""
        self._is_held = True

    def release(self) -> None:
        """Page out what is too much after `hold`."""
        self._is_held = False
        self._page_out()

    def forget(self, block: Block) -> None:
        """This block is not used any more."""
        self.memory_bytes -= self._blocks.pop(block, 0)

    def step(self) -> None:
        """Remove files that are not used any more, and try again where the disk took no page."""
        self._files.step()
        self._is_waiting = False
        self._page_out()

    @property
    def _is_over(self) -> bool:
        """Whether it holds too much; the block that was used last stays."""
        return self.memory_bytes > self.bytes_max and len(self._blocks) > 1

    def _page_out(self) -> None:
        for _ in range(_PAGED_OUT_MAX):
            if self._is_waiting or not self._is_over:
                return
            self._page_out_one()
        self._is_waiting = self._is_over

    def _page_out_one(self) -> None:
        block = next(iter(self._blocks))
        try:
            block.page_out(block.page or self._files.write(block.content().read()))
        except (NoRoomError, DiskError) as error:
            self._refusals.note("pages_of_dead_letters", error)
            self._is_waiting = True
            return
        self.forget(block)
