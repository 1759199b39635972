"""Reports the offsets that an archive has to the broker, so that retention waits for the rest.

Progress is reported only after files are written, verified, synced and committed. If a run dies in
between, the broker knows less than the archive has, and the next run reports the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from qmq_client.wire.operations import KeepRequest
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import Place

#: The default name under which a broker knows an archive.
KEEPER: Final = "archive"
UNKNOWN: Final = "this version of the broker does not wait for archives"
NOT_WANTED: Final = "not wanted (--no-keeper)"


@dataclass(slots=True, kw_only=True)
class Keeping:
    """One archive, and the broker whose logs it keeps."""

    #: The broker, with its token; None without one.
    place: Place | None
    name: str = KEEPER
    #: The reason why retention does not wait for this archive; empty while it does.
    not_waited_for: str = ""
    #: Log → offset below which this archive is complete.
    kept: dict[str, int] = field(default_factory=dict)

    def report(self, store_id: str, kept: Mapping[str, int]) -> bool:
        """Report the archived offset of each log to the broker; returns whether retention waits for the rest.

        Raises `SourceError` if the broker refuses: it has another store, or another archive has
        this name.
        """
        self.kept |= kept
        if self.place is None or self.not_waited_for:
            return False
        # Imported late, because it imports the HTTP client, which a directory does not need.
        from qmq_pipeline.places.remote import RemoteDisk

        request = KeepRequest(
            name=self.name,
            store_id=store_id,
            kept_offset=self.kept.get(COMMIT_LOG, 0),
            kept_actions_offset=self.kept.get(ACTION_LOG, 0),
        )
        broker = RemoteDisk(self.place.address, wait_s=self.place.wait_s)
        try:
            if broker.keep(request) is None:
                self.not_waited_for = UNKNOWN
        finally:
            broker.close()
        return not self.not_waited_for


def keeping_of(broker: Place | None, *, name: str | None, is_wanted: bool) -> Keeping:
    """The keeping that the options of a command describe."""
    if not is_wanted:
        return Keeping(place=None, not_waited_for=NOT_WANTED)
    return Keeping(place=broker, name=KEEPER if name is None else name)
