"""From the place that an option names to an open log, in the driver and in every worker."""

from __future__ import annotations

from qmq_broker.storage.disk_port import Disk
from qmq_pipeline.disks import LocalDisk
from qmq_pipeline.log import LogReader
from qmq_pipeline.options import Place


def open_disk(place: Place) -> Disk:
    """The files at this place, to be read."""
    assert place.path is not None
    return LocalDisk(place.path.removeprefix("file://"))


def open_log(place: Place, log: str) -> LogReader:
    """One log at this place; raises `SourceError`."""
    return LogReader(open_disk(place), log, source=place.name)
