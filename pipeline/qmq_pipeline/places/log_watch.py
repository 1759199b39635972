"""A log that a stream checks repeatedly.

The first check reads lists of files, the checkpoint, and the log from there on. Each later check
reads only newer frames, which at a broker costs three small requests, or seven if there is nothing
new.
"""

from __future__ import annotations

from qmq_pipeline.places.log import LogBounds, LogReader
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log


class LogWatch:
    """One log and its extent when last checked. One thread at a time."""

    def __init__(self, place: Place, log: str) -> None:
        """Opens nothing until it is needed."""
        self._place = place
        self._log = log
        self._reader: LogReader | None = None
        #: Its extent when last checked; None before, and when closed.
        self.known: LogBounds | None = None

    @property
    def reader(self) -> LogReader:
        """The log, open. Raises `SourceError`."""
        if self._reader is None:
            self._reader = open_log(self._place, self._log)
        return self._reader

    def look(self) -> LogBounds:
        """The range of the log that may be read now.

        The lower end is that of the last `look_anew`: readers of a range detect that retention has deleted it.
        """
        seen = None if self.known is None else self.reader.bounds_since(self.known)
        if seen is None or (seen == self.known and self._is_other_log()):
            return self.look_anew()
        self.known = seen
        return seen

    def _is_other_log(self) -> bool:
        """Whether a log without new frames was restored to an older state, and may be shorter than before."""
        last = None if self.known is None else self.known.last_frame
        return last is not None and not self.reader.has_stamp(*last)

    def look_anew(self) -> LogBounds:
        """Like `look`, but reads all of it again: the store may be another one, or retention has deleted segments."""
        self.close()
        self.known = self.reader.bounds()
        return self.known

    def close(self) -> None:
        """Close the log; the next check opens it again."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self.known = None
