"""The errors of the broker, as one tree.

::

    QmqError                      (qmq_client.wire.errors)
    ├── StoreError                the data directory
    │   ├── LockedError           another process uses it; stop that process, or use another directory
    │   ├── SharedFilesError      its files are hard links to those of another directory; copy them without links
    │   ├── UnknownFormatError    another version or another setting wrote it; nothing was touched
    │   ├── CorruptionError       accepted data is damaged; nothing was touched; an operator must decide
    │   ├── NoRoomError           nothing was written; works again when there is room
    │   │   ├── DiskFullError     no room above the reserve; make room
    │   │   └── FilesFullError    no more files may be open; raise the limit of the process
    │   ├── DiskError             the operating system refused a call on a file
    │   ├── PoisonedError         a write or sync failed; only a restart helps
    │   ├── ClosedError           the store was closed
    │   └── HeldError             a damaged file may hide the message (service/delay/query.py)
    ├── ServiceError              a request that was understood and is refused
    │   ├── BusyError             try again after `retry_after_s`
    │   ├── UnavailableError      the broker does not do this in its current state
    │   ├── NotFoundError         the subject, group or message of the request does not exist
    │   ├── NotEmptyError         the subject to be removed is still used
    │   ├── ConflictError         a message id stored before with other content
    │   ├── GroupConflictError    a pull whose filter or order differs from its group's
    │   ├── ConsumerReplacedError a pull of a broadcast whose name another process has taken over
    │   └── InvalidRecordError    one record of the request is damaged; names its message
    ├── RequestRefusedError       refused before its content was looked at (face/answers.py)
    ├── TokenFileError            the tokens cannot be used (face/authentication/token_file.py)
    └── TlsError                  a certificate or key cannot be used (face/authentication/tls.py)

An error that only one module raises, and none below it knows, is defined there and drawn here.

Exceptions of the system (`OSError`) are translated in one place, `storage/files/disk_errors.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from qmq_client.wire.errors import QmqError
from qmq_client.wire.groups import REPLACED_REMEDY


class StoreError(QmqError):
    """An error of the data directory."""

    code = "store"
    status = 503


@dataclass(kw_only=True, eq=False, repr=False)
class LockedError(StoreError):
    """Another process uses this data directory; nothing was touched."""

    directory: str
    #: The text that the holder wrote: its process id.
    holder: str

    code = "locked"
    text = (
        "data directory {directory} is in use by {holder}. "
        "Stop that process, or give this one a directory of its own."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class SharedFilesError(StoreError):
    """The data directory is a hard-linked copy, or has one; nothing was touched.

    Remove the other directory, or copy this one without links (`cp -a`) and start on that copy.
    """

    #: A file below the data directory …
    path: str
    #: … and how many names it has.
    names: int

    code = "shared_files"
    text = (
        "{path} has {names} names: another directory is a hard-linked copy of this one (cp -al, rsync "
        "--link-dest), and a write to one alters both. Remove the other one, or copy this one "
        "without links (cp -a) and use that copy. `qmq store backup` makes copies that share only "
        "files that never change."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class UnknownFormatError(StoreError):
    """The data directory was written by another version or with other settings.

    Nothing was touched.
    """

    setting: str
    found: str
    known: str
    #: The remedy for data of a later version.
    remedy: str = "Start the version that wrote it, or a later one."

    code = "unknown_format"
    text = "{setting} of the data directory is {found}; known: {known}. {remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class CorruptionError(StoreError):
    """Accepted data is damaged. Nothing was changed.

    Restore a backup; or, to go on without the damaged part, copy the directory and start with
    `--quarantine`. Do not cut files by hand.
    """

    #: Path of the file below the data directory.
    segment: str
    #: Offset in the log (not in the file) of the first damaged byte.
    offset: int
    reason: str
    #: For callers over HTTP and for the log; `verify` has a remedy for each fault.
    remedy: str = "Stop the broker, and run `qmq store verify`: it reports the losses and how to repair the files."

    code = "corruption"
    status = 500
    text = "{segment} is damaged at offset {offset}: {reason}"


class NoRoomError(StoreError):
    """The machine has no room for this now. Nothing was written; try again when there is room."""

    code = "no_room"


class DiskFullError(NoRoomError):
    """There is no room above the reserve."""

    code = "disk_full"
    status = 507


def disk_full(*, free_bytes: int, needed_bytes: int, reserve_bytes: int) -> DiskFullError:
    """The refusal of a request that would use the disk reserve."""
    return DiskFullError(
        f"{free_bytes} bytes are free; {needed_bytes} are needed above the reserve of {reserve_bytes}. "
        "Make room on the disk, or lower the reserve (--reserve-bytes).",
        field="free space of the disk",
        limit=f"{reserve_bytes} bytes stay free",
        value=f"{free_bytes} bytes",
    )


class FilesFullError(NoRoomError):
    """The process, or the machine, cannot open more files."""

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
    """A write or sync of a log failed, so the content of the disk is unknown.

    Nothing more is written or acknowledged. Restart: the log is verified and its tail written again.
    """

    code = "poisoned"


class ClosedError(StoreError):
    """The store was closed."""

    code = "closed"


class ServiceError(QmqError):
    """The broker understood the request and refuses it; no part of it was carried out."""

    code = "refused"


@dataclass(kw_only=True, eq=False, repr=False)
class BusyError(ServiceError):
    """A limit is currently reached."""

    code = "busy"
    #: The HTTP status; 503 if the broker is overloaded for all callers and sizes of requests.
    status: int = 429


def being_removed(subject: str) -> BusyError:
    """The refusal of a request for a subject that is being removed."""
    return BusyError(
        f"subject {subject} is being removed",
        field="subject",
        value=subject,
        remedy="Try again after it is removed.",
        retry_after_s=1.0,
    )


@dataclass(kw_only=True, eq=False, repr=False)
class UnavailableError(ServiceError):
    """The broker does not do this in its current state."""

    state: str

    code = "unavailable"
    status = 503


class NotFoundError(ServiceError):
    """The subject, group or message that the request names does not exist."""

    code = "not_found"
    status = 404


def no_subject(subject: str) -> NotFoundError:
    """The error for a subject that the broker does not have."""
    return NotFoundError(
        f"there is no subject {subject}",
        field="subject",
        value=subject,
        remedy="`qmq subjects` lists them.",
    )


def no_group(group: str, subject: str) -> NotFoundError:
    """The error for a group that the subject does not have."""
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
    """A pull asks for another filter or order than its group has (`limit`); nothing was delivered."""

    subject: str
    group: str
    remedy: str = (
        "Use the same settings in all consumers of the group; change the group's tags first "
        "(POST /v1/groups/configure), or use another group."
    )

    code = "group_conflict"
    status = 409
    text = "group {group} on {subject} has {field} {limit}; asked for: {value}. {remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class ConsumerReplacedError(ServiceError):
    """Another process pulls under the same name of a broadcast (`value`); nothing was delivered."""

    field: str = "consumer"
    limit: str = "one process"
    remedy: str = REPLACED_REMEDY

    code = "consumer_replaced"
    status = 409


class InvalidRecordError(ServiceError):
    """One record of the request was altered after its producer made it."""

    code = "invalid_record"
    status = 422
