"""The frame: the unit of a request and of every append-only log; the same bytes on wire and disk.

::

    offset bytes field                                                              made by
    0      4     magic "QMQF"                                                       sender
    4      1     version, 1                                                         sender
    5      1     kind                                                               sender
    6      2     number of subjects, s                                              sender
    8      4     frame length with header and fill, a multiple of 8                 sender
    12     4     number of records, n                                               sender
    16     4     body CRC-32C: bytes 0 … 15 and the body                            sender
    20     4     stamp CRC-32C: bytes 0 … 19, 24 … 55 and the sequences             log
    24     8     physical offset of this frame in its log                           log
    32     8     stored at, ms since 1970 UTC; never goes back within a log         log
    40     4     epoch: one more at each opening of the log                         log
    44     4     durable gap: physical offset less what was durable when written    log
    48     8     reserved, 0
    56     8 s   first sequence of each subject's run                               log
    …            body: to the frame's end

Body of a message frame (MESSAGES, DELAYED and others): the subject table (s times: count 4, name
length 1, name), then three columns: record lengths (4 n), tag hashes (8 n), and the records
themselves, the records of one subject standing together in the order of the subject table, then
zero fill to a multiple of 8, then, in kinds of the broker's own, marks for the records (`marks.py`).
Bodies of other kinds belong to the module that writes them.

The sender makes everything but the stamp; a log appends the sender's bytes unchanged behind a
stamped head. Physical offset and epoch are guarded by the stamp's own checksum, so stale bytes in
a recycled file are never taken for new ones. A frame is wholly there or wholly absent and never
crosses a segment. Big-endian. Documented for people in `docs/format/frame.md`; the idea of one
batch as the unit of wire, log and checksum is Kafka's record batch, version 2.

Others import everything about frames from here: the head of any frame is made and read in
`frame_head.py`, the body of messages in `message_frame.py`.
"""

from __future__ import annotations

from qmq_client.wire.frame_head import (
    DURABLE_GAP_MAX,
    FRAME_ALIGNMENT_BYTES,
    FRAME_HEADER_BYTES,
    FRAME_MAGIC,
    FRAME_VERSION,
    PHYSICAL_OFFSET_POSITION,
    SEQUENCE_BYTES,
    FrameHeader,
    build_frame,
    build_padding,
    parse_frame,
    read_header,
    stamp_frame,
    unknown_format,
    verify_body,
    verify_stamp,
)
from qmq_client.wire.frame_kind import FrameKind
from qmq_client.wire.message_frame import (
    MessageFrame,
    SubjectRun,
    build_message_frame,
    parse_message_frame,
    parse_subjects,
)

__all__ = [
    "DURABLE_GAP_MAX",
    "FRAME_ALIGNMENT_BYTES",
    "FRAME_HEADER_BYTES",
    "FRAME_MAGIC",
    "FRAME_VERSION",
    "PHYSICAL_OFFSET_POSITION",
    "SEQUENCE_BYTES",
    "FrameHeader",
    "FrameKind",
    "MessageFrame",
    "SubjectRun",
    "build_frame",
    "build_message_frame",
    "build_padding",
    "parse_frame",
    "parse_message_frame",
    "parse_subjects",
    "read_header",
    "stamp_frame",
    "unknown_format",
    "verify_body",
    "verify_stamp",
]
