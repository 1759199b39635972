"""Faults in the files of a stopped broker, and their consequences.

Three levels, by the reaction of the next start: accepted data is **damaged** (it cannot be
restored); a derived file is **rebuilt**; or the fault is **ignored**, because nothing depends on
it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from qmq_broker.storage.files import layout


class Level(StrEnum):
    """How serious a fault is, worst first."""

    #: Accepted data is missing or altered.
    DAMAGED = "damaged"
    #: A derived file is wrong; the next start rebuilds it, with the same answers.
    REBUILT = "rebuilt"
    #: A hint is lost, or a file is not the broker's; the next start ignores it.
    IGNORED = "ignored"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    level: Level
    #: Path below the data directory.
    file: str
    #: In a log: the offset in the log. Otherwise the byte in the file. None for the whole file.
    offset: int | None = None
    what: str
    #: The consequences for the broker and its messages.
    meaning: str
    remedy: str

    def line(self) -> str:
        """The whole fault in one line."""
        place = self.file if self.offset is None else f"{self.file} at offset {self.offset}"
        return f"{self.level}: {place}: {self.what}. {self.meaning} {self.remedy}"


RESTORE: Final = (
    "Restore a backup; or, to go on without the damaged part, copy this directory and start the "
    "broker with --quarantine. Do not cut files by hand."
)
#: Remedies for files without which a quarantine cannot start.
PUT_BACK: Final = {
    layout.FORMAT: "It never changes: put it back from any backup of this store, then verify "
    "again, because no other file can be verified without it.",
    layout.RETAINED: "Restore a backup; a quarantine does not skip this file.",
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
    """Accepted data was altered."""
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
        meaning="It is rebuilt from the commit log; no message is affected.",
        remedy=AT_START,
    )


def ignored(file: str, what: str, meaning: str, *, offset: int | None = None) -> Fault:
    """Nothing depends on the faulty part."""
    return Fault(
        level=Level.IGNORED,
        file=file,
        offset=offset,
        what=what,
        meaning=meaning,
        remedy=NOTHING,
    )
