"""The file and folder names of a data directory: all of them are built and parsed here.

::

    LOCK  FORMAT  CLEAN  checkpoint.0  checkpoint.1
    commitlog/<20 digits>                     offset of the segment's first byte
    commitlog/spare.<number>                  a segment that is kept to be written again
    commitlog/spare.new                       a spare segment that is being created
    actionlog/<20 digits>                     the same as of the commit log
    consumequeue/<subject>/<20 digits>        byte offset of the file's first entry in its queue
    quarantine/<20 digits>-<20 digits>.raw    bytes of the commit log that were damaged, a .json next to
    state/queues                              how much of each consume queue is in its files
    state/retained                            where the commit log begins
    state/keepers                             the keepers, and the offset up to which each has the logs
    state/actions                             how far the action log was durable: a third checkpoint
    state/groups.0  state/groups.1            the state of all groups at one offset of the action log
    index/<17 digits>                         key index, by the time of its first entry
    state/index                               how much of the key index is in its files
    schedule/<yyyyMM>/<yyyyMMddHHmm>          delayed messages, whole, by the span of their due times
    dispatch/<yyyyMM>/<yyyyMMddHHmm>          the states of the messages of one span
    sorted/<yyyyMMddHHmm>                     a large bucket sorted by due time; exists while a broker runs
    letters/<20 digits>                       dead letters that are not in memory; exists while a broker runs
    state/schedule                            how much of both is in their files
    ids/<20 digits>                           message ids that are remembered, in order of the log
    entries/<20 digits>                       entries that are not in their consume queues yet
    summary/<20 digits>                       the content of the sealed commit log segment of this name

Paths are relative to the data directory, with forward slashes. Folder names of subjects differ even
on disks that ignore case: an upper-case letter is written as `~` and its lower case, everything
else that a subject may contain stays as it is (`~` is not allowed in a subject).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from qmq_client.wire.names import is_name

LOCK: Final = "LOCK"
FORMAT: Final = "FORMAT"
CLEAN: Final = "CLEAN"
CHECKPOINTS: Final = ("checkpoint.0", "checkpoint.1")
ROOT: Final = ""
#: A third checkpoint: it remains if both others are lost.
ACTIONS_WITNESS: Final = "state/actions"
COMMIT_LOG: Final = "commitlog"
ACTION_LOG: Final = "actionlog"
CONSUME_QUEUES: Final = "consumequeue"
STATE: Final = "state"
QUARANTINE: Final = "quarantine"
QUEUE_TABLE: Final = "state/queues"
#: The current table of the consume queues, and the one before it.
QUEUE_TABLES: Final = (QUEUE_TABLE, "state/queues.before")
RETAINED: Final = "state/retained"
KEEPERS: Final = "state/keepers"
SCHEDULE: Final = "schedule"
DISPATCH: Final = "dispatch"
SORTED: Final = "sorted"
LETTERS: Final = "letters"
SCHEDULE_TABLE: Final = "state/schedule"
INDEX: Final = "index"
INDEX_TABLE: Final = "state/index"
SUMMARIES: Final = "summary"
IDS: Final = "ids"
ENTRIES: Final = "entries"
SNAPSHOTS: Final = ("state/groups.0", "state/groups.1")
#: Written first and renamed over the file it replaces.
DRAFT_SUFFIX: Final = ".new"
SPARE_DRAFT: Final = "commitlog/spare.new"

_DIGITS: Final = 20
_SPARE: Final = re.compile(r"spare\.([0-9]{1,4})\Z")
_NUMBER: Final = re.compile(rf"[0-9]{{{_DIGITS}}}\Z")
_MONTH_NAME: Final = re.compile(r"[0-9]{6}\Z")
_BUCKET_NAME: Final = re.compile(r"[0-9]{12}\Z")
_INDEX_NAME: Final = re.compile(r"[0-9]{17}\Z")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UPPER: Final = re.compile("[A-Z]")
_ESCAPE: Final = re.compile("~([a-z])")


def quarantine_path(first_offset: int, next_offset: int, suffix: str) -> str:
    """Where a damaged range of the commit log is kept: `raw` its bytes, `json` the report."""
    return f"{QUARANTINE}/{first_offset:0{_DIGITS}d}-{next_offset:0{_DIGITS}d}.{suffix}"


def draft_path(path: str) -> str:
    """Where the successor of a small file is written before it takes its place."""
    return path + DRAFT_SUFFIX


def segment_path(log: str, base_offset: int) -> str:
    """The segment of `log` that begins at `base_offset`."""
    return f"{log}/{base_offset:0{_DIGITS}d}"


def parse_number(name: str) -> int | None:
    """The offset that names a segment or queue file; None if the name has another form."""
    return int(name) if _NUMBER.match(name) else None


def spare_path(log: str, number: int) -> str:
    """A segment of `log` that is kept to be written again."""
    return f"{log}/spare.{number}"


def parse_spare(name: str) -> int | None:
    """The number of a spare segment; None if the name has another form."""
    found = _SPARE.match(name)
    return int(found[1]) if found else None


def summary_path(base_offset: int) -> str:
    """The summary of the segment of the commit log that begins there."""
    return segment_path(SUMMARIES, base_offset)


def index_name(stored_at_ms: int) -> str:
    """The name of a key index file whose first entry has this time: yyyyMMddHHmmssSSS in UTC."""
    time = _EPOCH + timedelta(milliseconds=stored_at_ms)
    return f"{time:%Y%m%d%H%M%S}{time.microsecond // 1000:03d}"


def index_path(name: str) -> str:
    """The file of the key index with this name."""
    return f"{INDEX}/{name}"


def is_index_name(name: str) -> bool:
    """Whether a key index file may have this name."""
    return _INDEX_NAME.match(name) is not None


def bucket_directory(log: str, bucket_ms: int) -> str:
    """The folder of the schedule or dispatch logs of one month: yyyyMM in UTC."""
    return f"{log}/{_EPOCH + timedelta(milliseconds=bucket_ms):%Y%m}"


def is_month_name(name: str) -> bool:
    """Whether a folder of schedule or dispatch logs may have this name."""
    return _MONTH_NAME.match(name) is not None


def bucket_path(log: str, bucket_ms: int) -> str:
    """The schedule or dispatch log of the bucket that begins then: yyyyMMddHHmm in UTC."""
    time = _EPOCH + timedelta(milliseconds=bucket_ms)
    return f"{bucket_directory(log, bucket_ms)}/{time:%Y%m%d%H%M}"


def sorted_path(bucket_ms: int) -> str:
    """The messages of a bucket, ordered by due time."""
    return f"{SORTED}/{_EPOCH + timedelta(milliseconds=bucket_ms):%Y%m%d%H%M}"


def letters_path(number: int) -> str:
    """A block of dead letters that is not in memory."""
    return f"{LETTERS}/{number:0{_DIGITS}d}"


def parse_bucket(name: str) -> int | None:
    """The first millisecond of the bucket that names a file; None if the name has another form."""
    if not _BUCKET_NAME.match(name):
        return None
    try:
        time = datetime.strptime(name, "%Y%m%d%H%M").replace(tzinfo=UTC)
    except ValueError:
        return None
    return (time - _EPOCH) // timedelta(milliseconds=1)


def queue_directory(subject: str) -> str:
    """The folder of a subject's consume queue."""
    return f"{CONSUME_QUEUES}/{encode_subject(subject)}"


def queue_path(subject: str, first_offset: int) -> str:
    """The consume queue file whose first entry is at byte `first_offset` of the queue."""
    return f"{queue_directory(subject)}/{first_offset:0{_DIGITS}d}"


def encode_subject(subject: str) -> str:
    """A subject as a folder name. Requires: a valid name."""
    return _UPPER.sub(lambda letter: "~" + letter[0].lower(), subject)


def parse_subject(name: str) -> str | None:
    """The subject of a folder name; None if the name has another form."""
    subject = _ESCAPE.sub(lambda escape: escape[1].upper(), name)
    return subject if is_name(subject) and encode_subject(subject) == name else None
