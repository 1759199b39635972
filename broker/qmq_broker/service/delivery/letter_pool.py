"""The buffer pool of dead letters: which blocks of them are in memory, over all groups.

A block is used when it is read or changed. Beyond the bound, those that were not used for longest are
paged out to files of their own; one that did not change since it was read just drops its bytes.
Where the disk takes no more, blocks that changed stay in memory and are counted, so that in the end
groups get no new messages (`budget.py`).
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
        #: They may take so much.
        self.bytes_max = bytes_max
        #: Blocks in memory with their bytes as they were counted, the one used last at the end.
        self._blocks: dict[Block, int] = {}
        #: What all of them take in memory.
        self.memory_bytes = 0
        #: Those that are not used any more.
        self._forgotten: list[Block] = []
        #: Whether no page is written before the next step: the disk took none, or there are many.
        self._is_waiting = False
        self._is_held = False

    @property
    def file_bytes(self) -> int:
        """Length of the files of those that are paged out."""
        return self._files.length_bytes

    def used(self, block: Block) -> None:
        """This block was just read or changed; others may be paged out for it."""
        self._drop(block)
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
        """This block is not used any more; a later step frees it."""
        self._drop(block)
        self._forgotten.append(block)

    def step(self) -> None:
        """Free some of what is not used any more, files too, and try again where the disk took no page."""
        del self._forgotten[-_FREED_MAX:]
        self._files.step()
        self._is_waiting = False
        self._page_out()

    @property
    def _is_over(self) -> bool:
        """Whether it holds too much; the block that was used last stays."""
        return self.memory_bytes > self.bytes_max and len(self._blocks) > 1

    def _page_out(self) -> None:
        for _ in range(min(_PAGED_OUT_MAX, len(self._blocks) - 1)):  # the one used last stays
            if not self._is_over:
                return
            self._page_out_one()
        self._is_waiting = self._is_waiting or self._is_over

    def _page_out_one(self) -> None:
        block = next(iter(self._blocks))
        page = block.page or self._written(block)
        if page is None:  # those after it may need no room
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
