"""A log that is looked at again and again: by a stream, and by an ingest that follows it.

The first look is at all that there is: lists of files, the checkpoint, and the log from there on. Each later one reads
what has come since, which at a broker is four small requests.
"""

from __future__ import annotations

from types import TracebackType

from qmq_pipeline.places.log import LogBounds, LogReader
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log


class LogWatch:
    """One log and what it held when it was last looked at; a context that closes it. One thread at a time."""

    def __init__(self, place: Place, log: str) -> None:
        """Nothing is opened before it is asked for."""
        self._place = place
        self._log = log
        self._reader: LogReader | None = None
        #: What it held when it was last looked at; None before, and when it is closed.
        self.known: LogBounds | None = None

    def __enter__(self) -> LogWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close()

    @property
    def reader(self) -> LogReader:
        """The log, open. Raises `SourceError`."""
        if self._reader is None:
            self._reader = open_log(self._place, self._log)
        return self._reader

    def look(self) -> LogBounds:
        """From where to where the log may be read now.

        The lower end is the one of the last `look_anew`: who reads a range finds out that retention has passed it.
        """
        seen = None if self.known is None else self.reader.bounds_since(self.known)
        if seen is None:
            return self.look_anew()
        self.known = seen
        return seen

    def look_anew(self) -> LogBounds:
        """The same by a look at all that there is: another store may stand there, or retention has passed."""
        self.close()
        self.known = self.reader.bounds()
        return self.known

    def close(self) -> None:
        """Forget it; the next look begins anew."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self.known = None
