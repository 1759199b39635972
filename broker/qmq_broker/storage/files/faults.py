"""Faults in the files of a stopped broker, and their consequences.

Three levels, by what the next start does: accepted data is **damaged** (nothing can restore it); a
derived file is **rebuilt**; or what was found is **ignored**, because nothing needs it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from qmq_broker.storage.files import layout


class Level(StrEnum):
    """How serious a fault is, worst first."""

    #: Accepted data is missing or not as it was written.
    DAMAGED = "damaged"
    #: A derived file is wrong; the next start makes it again, with the same answers.
    REBUILT = "rebuilt"
    #: A hint is lost, or a file is not ours; the next start passes over it.
    IGNORED = "ignored"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    level: Level
    #: Path below the data directory.
    file: str
    #: In a log: the offset in the log. Otherwise the byte in the file. None for the whole file.
    offset: int | None = None
    what: str
    #: What follows for the broker and its messages.
    meaning: str
    remedy: str

    def line(self) -> str:
        """The whole fault in one line."""
        place = self.file if self.offset is None else f"{self.file} at offset {self.offset}"
        return f"{self.level}: {place}: {self.what}. {self.meaning} {self.remedy}"


RESTORE: Final = (
    "Restore a backup; or, when what is left is worth more than what is missing, copy this directory "
    "and start the broker with --quarantine. Cut nothing by hand."
)
#: What no quarantine passes over, and where a copy can be found.
PUT_BACK: Final = {
    layout.FORMAT: "It never changes: put it back from any backup of this store, then verify "
    "again, because nothing else can be judged without it.",
    layout.RETAINED: "Restore a backup; no quarantine passes over this file.",
    layout.KEEPERS: "Remove it, start the broker, and archive at once: until an archive has run, retention does not "
    "wait for it.",
}
NOT_STARTED: Final = "The broker does not start (exit code 4)."
NOTHING: Final = "Nothing needs to be done."
AT_START: Final = "Start the broker, or run `qmq store rebuild` on this directory."


def damaged(
    file: str,
    what: str,
    *,
    meaning: str = NOT_STARTED,
    offset: int | None = None,
    remedy: str = RESTORE,
) -> Fault:
    """Accepted data is not as it was written."""
    return Fault(
        level=Level.DAMAGED,
        file=file,
        offset=offset,
        what=what,
        meaning=meaning,
        remedy=PUT_BACK.get(file, remedy),
    )


def rebuilt(file: str, what: str, *, offset: int | None = None) -> Fault:
    """A derived file is wrong."""
    return Fault(
        level=Level.REBUILT,
        file=file,
        offset=offset,
        what=what,
        meaning="It is made again from the commit log; no message is touched.",
        remedy=AT_START,
    )


def ignored(file: str, what: str, meaning: str, *, offset: int | None = None) -> Fault:
    """Nothing needs what is wrong here."""
    return Fault(
        level=Level.IGNORED,
        file=file,
        offset=offset,
        what=what,
        meaning=meaning,
        remedy=NOTHING,
    )
