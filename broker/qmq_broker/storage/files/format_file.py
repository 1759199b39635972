"""FORMAT: the version and settings a data directory was made with.

One JSON object and a checksum line (see `small_file.py`), written once, before anything else, and
never changed. A directory is refused and left untouched if it holds the broker's files without a
FORMAT, or with a FORMAT that this program does not know exactly.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from qmq_broker.errors import CorruptionError, StoreError, UnknownFormatError
from qmq_broker.options import SEGMENT_BYTES, StoreOptions
from qmq_broker.storage.files import layout
from qmq_broker.storage.files.disk_port import Disk
from qmq_broker.storage.files.small_file import read_file, replace_file, unknown_content, unseal

FORMAT_VERSION: Final = 1
CHECKSUM: Final = "crc32c"
STORE_ID_BYTES: Final = 16
_OURS: Final = frozenset(
    {layout.COMMIT_LOG, layout.ACTION_LOG, layout.CONSUME_QUEUES, layout.STATE, layout.CLEAN}
    | {layout.INDEX, layout.SUMMARIES, layout.SCHEDULE, layout.DISPATCH, layout.QUARANTINE}
    | {layout.IDS, layout.ENTRIES, layout.SORTED, layout.LETTERS}
    | set(layout.CHECKPOINTS)
)
#: The fixed lengths of a directory that the command line can set, with the remedy.
_REMEDIES: Final = {
    "segment_bytes": "Leave --segment-bytes out, or give it with an empty directory."
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The settings of a data directory that never change."""

    #: Distinguishes segments of this store from those of another.
    store_id: bytes
    segment_bytes: int
    action_segment_bytes: int
    queue_entries_per_file: int


class _Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    checksum: str
    store_id: str
    segment_bytes: int
    action_segment_bytes: int
    queue_entries_per_file: int


class _Version(msgspec.Struct, frozen=True):
    version: int


def open_format(disk: Disk, options: StoreOptions) -> Format:
    """The format of the directory; written if the directory is new, otherwise verified.

    Raises `UnknownFormatError` or `CorruptionError`, having touched nothing.
    """
    format_ = check_format(disk, options)
    return _make(disk, options) if format_ is None else format_


def check_format(disk: Disk, options: StoreOptions) -> Format | None:
    """The format of the directory if it matches these options; None for a directory without one.

    Raises `UnknownFormatError` or `CorruptionError`. Changes nothing.
    """
    format_ = read_format(disk)
    if format_ is None:
        return None
    for setting in ("segment_bytes", "action_segment_bytes", "queue_entries_per_file"):
        found, wanted = getattr(format_, setting), getattr(options, setting)
        if wanted and found != wanted:
            remedy = _REMEDIES.get(setting, f"Start with {setting} {found}.")
            raise UnknownFormatError(
                setting=setting, found=str(found), known=str(wanted), remedy=remedy
            )
    return format_


def read_format(disk: Disk) -> Format | None:
    """The format of a directory that is only read, with any lengths; None without one.

    Raises `UnknownFormatError` or `CorruptionError`. Changes nothing.
    """
    data = read_file(disk, layout.FORMAT)
    return None if data is None else _format(_parse(data))


def required_format(disk: Disk) -> Format:
    """The format of a directory; raises `StoreError` if it has none."""
    format_ = read_format(disk)
    if format_ is None:
        raise not_a_data_directory("FORMAT is missing")
    return format_


def not_a_data_directory(reason: str) -> StoreError:
    """The error for a directory that is not a data directory."""
    return StoreError(
        f"this is not a data directory: {reason}",
        remedy="Give the data directory of a broker, or a complete backup.",
    )


def _make(disk: Disk, options: StoreOptions) -> Format:
    found = sorted(_OURS.intersection(disk.names(layout.ROOT)))
    if found:
        raise UnknownFormatError(
            setting="FORMAT file",
            found=f"missing, but there is {found[0]}",
            known=f"version {FORMAT_VERSION}",
            remedy="Restore FORMAT from a copy of this directory, or give an empty directory.",
        )
    written = _Written(
        version=FORMAT_VERSION,
        checksum=CHECKSUM,
        store_id=secrets.token_hex(STORE_ID_BYTES),
        segment_bytes=options.segment_bytes or SEGMENT_BYTES,
        action_segment_bytes=options.action_segment_bytes,
        queue_entries_per_file=options.queue_entries_per_file,
    )
    replace_file(disk, layout.FORMAT, msgspec.json.encode(written))
    return _format(written)


def _parse(data: bytes) -> _Written:
    content = unseal(data)
    if content is None:
        raise CorruptionError(segment=layout.FORMAT, offset=0, reason="its checksum does not match")
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version != FORMAT_VERSION:
            raise UnknownFormatError(
                setting="format version",
                found=str(version),
                known=str(FORMAT_VERSION),
            )
        written = msgspec.json.decode(content, type=_Written)
        is_id = len(bytes.fromhex(written.store_id)) == STORE_ID_BYTES
    except (msgspec.MsgspecError, ValueError) as error:
        raise unknown_content(layout.FORMAT, str(error)) from error
    if written.checksum != CHECKSUM or not is_id:
        raise UnknownFormatError(
            setting="checksum",
            found=written.checksum,
            known=CHECKSUM,
        )
    return written


def _format(written: _Written) -> Format:
    return Format(
        store_id=bytes.fromhex(written.store_id),
        segment_bytes=written.segment_bytes,
        action_segment_bytes=written.action_segment_bytes,
        queue_entries_per_file=written.queue_entries_per_file,
    )
