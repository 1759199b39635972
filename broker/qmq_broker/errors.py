"""The errors of the broker, as one tree.

::

    QmqError                      (qmq_client.wire.errors)
    ├── StoreError                the data directory
    │   ├── LockedError           another process has it; stop that one, or use another directory
    │   ├── SharedFilesError      its files are those of another directory too; copy them for real
    │   ├── UnknownFormatError    another version or another setting wrote it; nothing was touched
    │   ├── CorruptionError       accepted data is damaged; nothing was touched, ask a person
    │   ├── NoRoomError           nothing was written; when there is room it goes on by itself
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
    ├── TokenFileError            the tokens cannot be used (face/callers/token_file.py)
    └── TlsError                  a certificate or key cannot be used (face/callers/tls.py)

What only one module raises, and nobody below it knows, is defined there and drawn here.

Foreign exceptions (`OSError`) are translated at one door, `storage/files/disk_errors.py`.
"""

from __future__ import annotations

from typing import Final

from qmq_client.wire.errors import QmqError
from qmq_client.wire.groups import REPLACED_REMEDY, replaced_text
from qmq_client.wire.requests import PullRequest


class StoreError(QmqError):
    """Something about the data directory."""

    code = "store"


class LockedError(StoreError):
    """Another process works on this data directory; nothing of it was touched."""

    code = "locked"

    def __init__(self, *, directory: str, holder: str) -> None:
        super().__init__(
            f"data directory {directory} is in use by {holder or 'another process'}. "
            "Stop that process, or give this one a directory of its own."
        )
        self.directory = directory
        #: What the holder wrote about itself: its pid.
        self.holder = holder


class SharedFilesError(StoreError):
    """The data directory is a hard-linked copy, or has one; nothing of it was touched.

    Remove the other directory, or copy this one without links (`cp -a`) and start on that copy.
    """

    code = "shared_files"

    def __init__(self, *, path: str, names: int) -> None:
        super().__init__(
            f"{path} has {names} names: another directory is a hard-linked copy of this one (cp -al, rsync "
            "--link-dest), and what is written to one alters both. Remove the other one, or copy this one "
            "without links (cp -a) and use that copy. `qmq store backup` makes copies that share nothing "
            "that is written."
        )
        #: A file below the data directory …
        self.path = path
        #: … and how many names it has.
        self.names = names


class UnknownFormatError(StoreError):
    """The data directory was written by another version or with other settings.

    Nothing was touched.
    """

    code = "unknown_format"
    #: For what a later version wrote.
    LATER: Final = "Start the version that wrote it, or a later one."

    def __init__(self, *, setting: str, found: str, known: str, remedy: str = LATER) -> None:
        super().__init__(f"{setting} of the data directory is {found}; known: {known}. {remedy}")
        self.setting = setting
        self.found = found
        self.known = known
        self.remedy = remedy


class CorruptionError(StoreError):
    """Data that had been accepted is not as it was written. Nothing was changed.

    Restore a backup; or, when what is left is worth more than what is missing, copy the directory and
    start with `--quarantine`. Nothing is to be cut by hand.
    """

    code = "corruption"
    #: For callers over HTTP and for the log; `verify` has a remedy for each fault.
    remedy = (
        "Stop the broker, and run `qmq store verify`: it says what is lost and how to repair it."
    )

    def __init__(self, *, segment: str, offset: int, reason: str) -> None:
        super().__init__(f"{segment} is damaged at offset {offset}: {reason}")
        #: Path of the file below the data directory.
        self.segment = segment
        #: Offset in the log (not in the file) of the first byte that is not as written.
        self.offset = offset
        self.reason = reason


class NoRoomError(StoreError):
    """The machine has no room for this now. Nothing was written; try again when there is."""

    code = "no_room"


class DiskFullError(NoRoomError):
    """There is no room above the reserve."""

    code = "disk_full"


class FilesFullError(NoRoomError):
    """The process, or the machine, may open no more files."""

    code = "files_full"


class DiskError(StoreError):
    """The operating system refused a call on a file."""

    code = "disk"

    def __init__(self, *, operation: str, path: str, reason: str) -> None:
        super().__init__(f"{operation} of {path}: {reason}")
        self.operation = operation
        self.path = path
        self.reason = reason


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


class BusyError(ServiceError):
    """A bound is reached for the moment."""

    code = "busy"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        is_for_everybody: bool = False,
        field: str = "",
        limit: str = "",
        value: str = "",
        remedy: str = "",
    ) -> None:
        """`is_for_everybody`: the broker is behind, for every caller and every size."""
        super().__init__(f"{message}. {remedy}" if remedy else message)
        self.retry_after_s = retry_after_s
        self.is_for_everybody = is_for_everybody
        #: What the bound is of, the bound, what there is, and what makes room.
        self.field = field
        self.limit = limit
        self.value = value
        self.remedy = remedy


class UnavailableError(ServiceError):
    """The broker does not do this in its present state."""

    code = "unavailable"

    def __init__(self, message: str, *, state: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.state = state
        self.retry_after_s = retry_after_s


class NotFoundError(ServiceError):
    """What the request names is not there."""

    code = "not_found"


class NotEmptyError(ServiceError):
    """A subject is still used; nothing was removed."""

    code = "not_empty"

    def __init__(self, *, subject: str, field: str, count: int, remedy: str) -> None:
        super().__init__(f"subject {subject} has {field}: {count}. {remedy}")
        #: What it still has, and how many.
        self.field = field
        self.limit = "0"
        self.value = str(count)
        self.remedy = remedy


class ConflictError(ServiceError):
    """A message id was stored before with other content."""

    code = "id_conflict"

    def __init__(self, message: str, *, message_id: str) -> None:
        super().__init__(message)
        self.message_id = message_id


class GroupConflictError(ServiceError):
    """A pull asks for another filter or order than its group has; nothing was given."""

    code = "group_conflict"

    def __init__(self, *, subject: str, group: str, field: str, limit: str, value: str) -> None:
        remedy = (
            "Ask for the same in all consumers of the group; change its tags first "
            "(POST /v1/groups/configure), or take another group."
        )
        super().__init__(
            f"group {group} on {subject} has {field} {limit}; asked for: {value}. {remedy}"
        )
        self.subject = subject
        self.group = group
        self.field = field
        #: What the group has.
        self.limit = limit
        #: What was asked for.
        self.value = value
        self.remedy = remedy


class ConsumerReplacedError(ServiceError):
    """Another process pulls under the same name of a broadcast; nothing was given."""

    code = "consumer_replaced"

    def __init__(self, request: PullRequest) -> None:
        super().__init__(f"{replaced_text(request)}. {REPLACED_REMEDY}")
        self.field = "consumer"
        self.limit = "one process"
        #: The name that both use.
        self.value = request.consumer
        self.remedy = REPLACED_REMEDY


class InvalidRecordError(ServiceError):
    """One record of the request is not as its producer made it."""

    code = "invalid_record"

    def __init__(self, message: str, *, message_id: str) -> None:
        super().__init__(message)
        self.message_id = message_id
