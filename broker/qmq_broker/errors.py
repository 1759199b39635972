"""The errors of the broker, as one tree.

::

    QmqError                      (qmq_client.wire.errors)
    ├── StoreError                the data directory
    │   ├── LockedError           another process has it; stop that one, or use another directory
    │   ├── SharedFilesError      its files are those of another directory too; copy them for real
    │   ├── UnknownFormatError    another version or another setting wrote it; nothing was touched
    │   ├── CorruptionError       accepted data is damaged; nothing was touched, ask a person
    │   ├── NoRoomError           nothing was written; when there is room it resumes by itself
    │   │   ├── DiskFullError     no room above the reserve; make room
    │   │   └── FilesFullError    no more files may be open; raise the limit of the process
    │   ├── DiskError             the operating system refused a call on a file
    │   ├── PoisonedError         a write or sync failed; only a restart helps
    │   ├── ClosedError           the store was closed
    │   └── HeldError             a damaged file may hide the message (service/delay/query.py)
    ├── ServiceError              a request that was understood and is refused
    │   ├── BusyError             come back after `retry_after_s`
    │   ├── UnavailableError      the broker does not do this in its present state
    │   ├── NotFoundError         what the request names is not there
    │   ├── NotEmptyError         what is to be removed is still used
    │   ├── ConflictError         a message id stored before with other content
    │   ├── GroupConflictError    a pull that says something else than its group keeps
    │   ├── ConsumerReplacedError a pull of a broadcast whose name another process has taken over
    │   └── InvalidRecordError    one record of the request is damaged; names its message
    ├── RequestRefusedError       refused before its content was looked at (face/answers.py)
    ├── TokenFileError            the tokens cannot be used (face/authentication/token_file.py)
    └── TlsError                  a certificate or key cannot be used (face/authentication/tls.py)

An error that only one module raises, and none below it knows, is defined there and drawn here.

Foreign exceptions (`OSError`) are translated at one door, `storage/files/disk_errors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_client.wire.errors import QmqError
from qmq_client.wire.groups import REPLACED_REMEDY


class StoreError(QmqError):
    """Something about the data directory."""

    code = "store"
    status = 503


@dataclass(kw_only=True, eq=False, repr=False)
class LockedError(StoreError):
    """Another process works on this data directory; nothing of it was touched."""

    directory: str
    #: What the holder wrote about itself: its pid.
    holder: str

    code = "locked"
    text = (
        "data directory {directory} is in use by {holder}. "
        "Stop that process, or give this one a directory of its own."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class SharedFilesError(StoreError):
    """The data directory is a hard-linked copy, or has one; nothing of it was touched.

    Remove the other directory, or copy this one without links (`cp -a`) and start on that copy.
    """

    #: A file below the data directory …
    path: str
    #: … and how many names it has.
    names: int

    code = "shared_files"
    text = (
        "{path} has {names} names: another directory is a hard-linked copy of this one (cp -al, rsync "
        "--link-dest), and what is written to one alters both. Remove the other one, or copy this one "
        "without links (cp -a) and use that copy. `qmq store backup` makes copies that share nothing "
        "that is written."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownFormatError(StoreError):
    """The data directory was written by another version or with other settings.

    Nothing was touched.
    """

    setting: str
    found: str
    known: str
    #: For what a later version wrote.
    remedy: str = "Start the version that wrote it, or a later one."

    code = "unknown_format"
    text = "{setting} of the data directory is {found}; known: {known}. {remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class CorruptionError(StoreError):
    """Data that had been accepted is not as it was written. Nothing was changed.

    Restore a backup; or, when what is left is worth more than what is missing, copy the directory and
    start with `--quarantine`. Nothing is to be cut by hand.
    """

    #: Path of the file below the data directory.
    segment: str
    #: Offset in the log (not in the file) of the first byte that is not as written.
    offset: int
    reason: str
    #: For callers over HTTP and for the log; `verify` has a remedy for each fault.
    remedy: str = (
        "Stop the broker, and run `qmq store verify`: it says what is lost and how to repair it."
    )

    code = "corruption"
    status = 500
    text = "{segment} is damaged at offset {offset}: {reason}"


class NoRoomError(StoreError):
    """The machine has no room for this now. Nothing was written; try again when there is."""

    code = "no_room"


class DiskFullError(NoRoomError):
    """There is no room above the reserve."""

    code = "disk_full"
    status = 507


def disk_full(*, free_bytes: int, needed_bytes: int, reserve_bytes: int) -> DiskFullError:
    """The refusal of what would take from the reserve."""
    return DiskFullError(
        f"{free_bytes} bytes are free; {needed_bytes} are needed above the reserve of {reserve_bytes}. "
        "Make room on the disk, or lower the reserve (--reserve-bytes).",
        field="free space of the disk",
        limit=f"{reserve_bytes} bytes stay free",
        value=f"{free_bytes} bytes",
    )


class FilesFullError(NoRoomError):
    """The process, or the machine, may open no more files."""

    code = "files_full"


@dataclass(kw_only=True, eq=False, repr=False)
class DiskError(StoreError):
    """The operating system refused a call on a file."""

    operation: str
    path: str
    reason: str

    code = "disk"
    text = "{operation} of {path}: {reason}"


class PoisonedError(StoreError):
    """A write or sync of a log failed, so what is on the disk is not known any more.

    Nothing more is written or acknowledged. Restart: the log is verified and its tail written again.
    """

    code = "poisoned"


class ClosedError(StoreError):
    """The store was closed."""

    code = "closed"


class ServiceError(QmqError):
    """The broker understood the request and refuses it; nothing of it was done."""

    code = "refused"


@dataclass(kw_only=True, eq=False, repr=False)
class BusyError(ServiceError):
    """A bound is reached for the moment."""

    code = "busy"
    #: 503 where the broker is behind, for every caller and every size.
    status: int = 429


def being_removed(subject: str) -> BusyError:
    """The refusal of what needs the subject while it is removed."""
    return BusyError(
        f"subject {subject} is being removed",
        field="subject",
        value=subject,
        remedy="Try again when it is removed.",
        retry_after_s=1.0,
    )


@dataclass(kw_only=True, eq=False, repr=False)
class UnavailableError(ServiceError):
    """The broker does not do this in its present state."""

    state: str

    code = "unavailable"
    status = 503


class NotFoundError(ServiceError):
    """What the request names is not there."""

    code = "not_found"
    status = 404


def no_subject(subject: str) -> NotFoundError:
    """The answer about a subject that the broker does not have."""
    return NotFoundError(
        f"there is no subject {subject}",
        field="subject",
        value=subject,
        remedy="`qmq subjects` lists them.",
    )


def no_group(group: str, subject: str) -> NotFoundError:
    """The answer about a group that the subject does not have."""
    return NotFoundError(
        f"there is no group {group} on subject {subject}",
        field="group",
        value=group,
        remedy="`qmq groups` lists them.",
    )


@dataclass(kw_only=True, eq=False, repr=False)
class NotEmptyError(ServiceError):
    """A subject is still used; nothing was removed."""

    subject: str
    limit: str = "0"

    code = "not_empty"
    status = 409
    text = "subject {subject} has {field}: {value}. {remedy}"


class ConflictError(ServiceError):
    """A message id was stored before with other content."""

    code = "id_conflict"
    status = 409


@dataclass(kw_only=True, eq=False, repr=False)
class GroupConflictError(ServiceError):
    """A pull asks for another filter or order than its group has (`limit`); nothing was given."""

    subject: str
    group: str
    remedy: str = (
        "Ask for the same in all consumers of the group; change its tags first "
        "(POST /v1/groups/configure), or take another group."
    )

    code = "group_conflict"
    status = 409
    text = "group {group} on {subject} has {field} {limit}; asked for: {value}. {remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class ConsumerReplacedError(ServiceError):
    """Another process pulls under the same name of a broadcast (`value`); nothing was given."""

    field: str = "consumer"
    limit: str = "one process"
    remedy: str = REPLACED_REMEDY

    code = "consumer_replaced"
    status = 409


class InvalidRecordError(ServiceError):
    """One record of the request is not as its producer made it."""

    code = "invalid_record"
    status = 422
