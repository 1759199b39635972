"""`qmq store dump schedule | dispatch`: the files of delayed messages, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qmq_broker.errors import CorruptionError
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.format_file import Format
from qmq_broker.storage.schedule.columns import IN_SCHEDULE, Subjects
from qmq_broker.storage.schedule.files import ScheduleFiles
from qmq_client.wire.message_id import format_message_id

Row = dict[str, Any]


def schedule_rows(disk: Disk, format_: Format, subject: str | None) -> Iterator[Row]:
    """A row for each message of each schedule log, as far as the frames are whole."""
    files, subjects = ScheduleFiles(disk, format_.store_id), Subjects()
    try:
        for bucket in files.buckets(layout.SCHEDULE):
            path = layout.bucket_path(layout.SCHEDULE, bucket)
            try:
                next_position = files.good_bytes(layout.SCHEDULE, bucket)
                for columns in files.columns(bucket, subjects, next_position=next_position):
                    for index in range(len(columns)):
                        message = columns.message(index, subjects)
                        if subject in (None, message.subject):
                            yield {
                                "file": path,
                                "sequence": message.sequence,
                                "source": message.source,
                                "due_at_ms": message.due_at_ms,
                                "subject": message.subject,
                                "message_id": format_message_id(message.message_id),
                                "position": message.place & ~IN_SCHEDULE,
                                "record_bytes": message.record_bytes,
                            }
            except CorruptionError as error:
                yield {"file": path, "offset": error.offset, "damaged": error.reason}
    finally:
        files.close()


def dispatch_rows(disk: Disk, format_: Format) -> Iterator[Row]:
    """A row for each entry of each dispatch log."""
    files = ScheduleFiles(disk, format_.store_id)
    try:
        for bucket in files.buckets(layout.DISPATCH):
            path = layout.bucket_path(layout.DISPATCH, bucket)
            try:
                next_position = files.good_bytes(layout.DISPATCH, bucket)
                for fate, sequence in files.fates(bucket, next_position=next_position):
                    yield {"file": path, "sequence": sequence, "fate": fate.name.lower()}
            except CorruptionError as error:
                yield {"file": path, "offset": error.offset, "damaged": error.reason}
    finally:
        files.close()
