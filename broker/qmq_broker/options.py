"""The settings of a broker, validated once at construction.

File sizes belong to the format of the data directory: they are chosen when it is created, and other
values are refused later (see `storage/files/format_file.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from qmq_client.wire.limits import DEFAULT_LIMITS, FRAME_OVERHEAD_BYTES_MAX, Limits

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
MINUTE_MS: Final = 60_000
#: Frames begin at multiples of eight, and segments should not share disk pages.
SEGMENT_MULTIPLE_BYTES: Final = 512
#: Length of a commit log segment in a new directory, unless another is given.
SEGMENT_BYTES: Final = GIB
#: Retention deletes whole segments: longer ones would make it too coarse.
SEGMENT_BYTES_MAX: Final = 64 * GIB
#: Bounds of `retain_ms`: younger messages may still be on their way to a consumer that pulls at
#: once; a century means forever.
RETAIN_MS_MIN: Final = 1_000
RETAIN_MS_MAX: Final = 366 * 100 * 24 * 3_600_000


def room_for_a_frame_bytes(limits: Limits) -> int:
    """The shortest segment that fits the largest frame of these limits."""
    multiples = -(-(limits.frame_bytes + FRAME_OVERHEAD_BYTES_MAX) // SEGMENT_MULTIPLE_BYTES)
    return multiples * SEGMENT_MULTIPLE_BYTES


# Defined first because the defaults below are validated when this module is loaded.
def _check_range(options: object, field: str, lowest: int, highest: int) -> None:
    value = getattr(options, field)
    if not lowest <= value <= highest:
        raise ValueError(f"{field}: {value}; allowed: {lowest} to {highest}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The layout of a data directory, its retention and its buffers."""

    #: Length of a commit log segment; its files are named by multiples of it. 0 means the length
    #: the directory was made with, `SEGMENT_BYTES` for a new one.
    segment_bytes: int = 0
    #: Length of an action log segment.
    action_segment_bytes: int = 64 * MIB
    #: Space for a segment is allocated in steps of this, so that an idle broker stays small.
    growth_bytes: int = 16 * MIB
    #: Entries in one file of a consume queue: 6,000,000 bytes, as in RocketMQ.
    queue_entries_per_file: int = 300_000
    #: Message ids remembered to recognize repeats …
    dedupe_ids: int = 1_000_000
    #: … and for how long; whichever ends first.
    dedupe_ms: int = 600_000
    #: Free disk space below which no more is allocated for messages.
    reserve_bytes: int = 256 * MIB
    #: A checkpoint is written after this much new log, or …
    checkpoint_bytes: int = 64 * MIB
    #: … after this long while something is written.
    checkpoint_ms: int = 1_000
    #: Log bytes after which entries of consume queues move from their journal to their files, with
    #: one sync per subject; the log is kept that far back.
    queue_flush_bytes: int = GIB
    #: A segment of the commit log is deleted when all of it is older than this …
    retain_ms: int = 72 * 3_600_000
    #: … or when the log is longer than this without it; 0 for no limit.
    retain_bytes: int = 0
    #: Delete even messages that a group has not received yet.
    force_retention: bool = False
    #: Action log bytes after which a snapshot of the groups is written, but at least an eighth of
    #: the snapshot's length; a restart replays that much.
    snapshot_bytes: int = 4 * MIB
    #: Deleted segments of the commit log that are kept as spares.
    spare_segments: int = 2
    #: Entries in one file of the key index: 42 MB; 20,000,000 for 420 MB; 0 for no key index.
    index_entries: int = 2_000_000
    #: Files of the key index; the oldest are removed first.
    index_files: int = 1_000
    #: Delayed messages are kept in files by due time: each for a span of this length …
    bucket_ms: int = 3_600_000
    #: … and removed this long after its end, when no message in it waits any more.
    bucket_grace_ms: int = 3_600_000
    #: Consume queue files kept open at once.
    open_files: int = 256

    def __post_init__(self) -> None:
        if self.segment_bytes:
            _check_range(self, "segment_bytes", 1 * KIB, SEGMENT_BYTES_MAX)
        _check_range(self, "action_segment_bytes", 1 * KIB, 64 * GIB)
        _check_range(self, "growth_bytes", SEGMENT_MULTIPLE_BYTES, GIB)
        _check_range(self, "queue_entries_per_file", 1, 100_000_000)
        _check_range(self, "dedupe_ids", 0, 1_000_000_000)
        _check_range(self, "dedupe_ms", 0, 366 * 24 * 3_600_000)
        _check_range(self, "reserve_bytes", 0, 2**60)
        _check_range(self, "checkpoint_bytes", 1, GIB)
        _check_range(self, "checkpoint_ms", 1, 60_000)
        _check_range(self, "queue_flush_bytes", 1, 16 * GIB)
        _check_range(self, "retain_ms", RETAIN_MS_MIN, RETAIN_MS_MAX)
        _check_range(self, "retain_bytes", 0, 2**62)
        _check_range(self, "snapshot_bytes", 1, 16 * GIB)
        _check_range(self, "spare_segments", 0, 1_000)
        _check_range(self, "index_entries", 0, 100_000_000)
        _check_range(self, "index_files", 2, 100_000)
        _check_range(self, "bucket_ms", 5 * MINUTE_MS, 60 * MINUTE_MS)
        _check_range(self, "bucket_grace_ms", 0, 366 * 24 * 60 * MINUTE_MS)
        _check_range(self, "open_files", 4, 65_536)
        if self.bucket_ms % MINUTE_MS:
            raise ValueError(f"bucket_ms: {self.bucket_ms}; allowed: whole minutes")
        for setting in ("segment_bytes", "action_segment_bytes", "growth_bytes"):
            if getattr(self, setting) % SEGMENT_MULTIPLE_BYTES:
                raise ValueError(
                    f"{setting}: {getattr(self, setting)}; allowed: multiples of "
                    f"{SEGMENT_MULTIPLE_BYTES}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files of the listening socket's TLS, all PEM; read again when they change."""

    certificate_file: str
    key_file: str
    #: Clients must show a certificate from these authorities; empty to ask for none.
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        if not self.certificate_file or not self.key_file:
            raise ValueError("TLS needs both certificate_file and key_file: give the missing one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The address, data directory and security settings of a broker process."""

    #: The data directory.
    directory: str
    host: str = "127.0.0.1"
    port: int = 9470
    #: Callers without a token from this file are refused; empty to accept all callers.
    tokens_file: str = ""
    #: None for plain HTTP.
    tls: TlsOptions | None = None
    #: Serve only pulls and settlements.
    is_read_only: bool = False
    #: Discard damaged ranges of the logs at the start, after a copy and a report.
    is_quarantining: bool = False
    #: How long a stop waits for requests in progress.
    drain_ms: int = 10_000
    limits: Limits = DEFAULT_LIMITS
    store: StoreOptions = field(default_factory=StoreOptions)

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory: empty; give the data directory of this broker")
        _check_range(self, "port", 0, 65_535)
        _check_range(self, "drain_ms", 0, 3_600_000)
        room_bytes = room_for_a_frame_bytes(self.limits)
        if 0 < self.store.segment_bytes < room_bytes:
            raise ValueError(
                f"segment_bytes: {self.store.segment_bytes}; allowed: at least {room_bytes}, the room for a "
                f"frame of {self.limits.frame_bytes} bytes"
            )
