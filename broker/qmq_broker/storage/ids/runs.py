"""The message ids of a frame, as runs of consecutive counters.

An id is a producer instance and a dense counter, so the ids of a frame are mostly one run. This is
checked on sixteen columns of bytes, one for each byte of an id, against the expected columns: a
column is sliced out of the frame in one step, while checking ids one by one costs ten times as
much. The expected columns are cached: all but the last two are the same for 65,536 ids of a
producer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from operator import itemgetter
from typing import Final, NamedTuple

from qmq_broker.storage.logs.kinds import SENT_KINDS
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.frame import FrameHeader, MessageFrame, SubjectRun, parse_subjects
from qmq_client.wire.message_id import MESSAGE_ID_BYTES
from qmq_client.wire.names import OWN_PREFIX
from qmq_client.wire.record import MESSAGE_ID_POSITION

_COUNTER_MAX: Final = 2**64 - 1
#: A subject in the subject table of a frame: count 4, name length 1.
_SUBJECT_FIXED_BYTES: Final = 5
_OWN_SUBJECT: Final = OWN_PREFIX.encode()
_ID: Final = struct.Struct(">QQ")
_RAW_ID: Final = struct.Struct(f"{MESSAGE_ID_BYTES}s")
_SINGLE: Final = tuple(bytes((byte,)) for byte in range(256))
#: The last two bytes of all counters that are equal otherwise, as columns.
_LOW_END: Final = 2**16
_OTHER_BYTES: Final = b"".join([byte * 256 for byte in _SINGLE])
_LAST_BYTES: Final = bytes(range(256)) * 256
#: The bytes of an id before those two.
_SAME_BYTES: Final = MESSAGE_ID_BYTES - 2


class IdRun(NamedTuple):
    """Consecutive counters of one producer instance; half open."""

    instance: int
    first_counter: int
    next_counter: int


#: Ids by subject: only subject and id together identify a message.
SubjectIds = Mapping[str, Sequence[IdRun]]


def is_remembered(header: FrameHeader, data: bytes) -> bool:
    """Whether the window remembers the ids of this frame: a client sent it, and may send it again.

    Copies are made by the broker. Their ids are never used twice, and would only displace other ids.
    """
    first_name = header.head_bytes + _SUBJECT_FIXED_BYTES
    return header.kind in SENT_KINDS and not data.startswith(_OWN_SUBJECT, first_name)


def id_runs(frame: MessageFrame) -> list[IdRun]:
    """The ids of a frame as runs, across subjects.

    An id that occurs twice in the frame makes two overlapping runs.
    """
    return _id_runs(frame.data, frame.lengths, frame.positions[0])


def subject_ids(frame: MessageFrame) -> SubjectIds:
    """The ids of a frame as runs, by subject.

    An id that occurs twice under one subject makes two overlapping runs.
    """
    if len(frame.runs) == 1:
        return {frame.runs[0].subject: id_runs(frame)}
    return dict(_by_subject(frame.data, frame.runs, frame.lengths, frame.positions[0]))


def runs_of_each(message_ids: Mapping[str, Iterable[bytes]]) -> SubjectIds:
    """These ids as runs, by subject, in order.

    Requires: every subject has one, and none occurs twice under a subject.
    """
    return {
        subject: _joined(sorted(map(int.from_bytes, ids))) for subject, ids in message_ids.items()
    }


def scanned_ids(header: FrameHeader, data: bytes) -> SubjectIds:
    """Like `subject_ids`, for a message frame with verified checksums, without decoding its records.

    A start does this for every frame in the window. Raises `ProtocolError`.
    """
    runs, position = parse_subjects(data, header)
    count = header.record_count
    try:
        lengths = struct.unpack_from(f">{count}I", data, position)
        return dict(_by_subject(data, runs, lengths, position + 12 * count))
    except (struct.error, IndexError) as error:
        raise ProtocolError(f"not a message frame: {error}") from error


def _by_subject(
    data: bytes, runs: Iterable[SubjectRun], lengths: Sequence[int], position: int
) -> Iterator[tuple[str, list[IdRun]]]:
    first = 0
    for run in runs:
        some = lengths[first : first + run.count]
        yield run.subject, _id_runs(data, some, position)
        first += run.count
        position += sum(some)


def _id_runs(data: bytes, lengths: Sequence[int], first_position: int) -> list[IdRun]:
    """The ids of contiguous records; raises `struct.error` if some are missing."""
    count, length = len(lengths), lengths[0]
    first = first_position + MESSAGE_ID_POSITION
    if count == 1:
        instance, counter = _ID.unpack_from(data, first)
        return [IdRun(instance, counter, counter + 1)]
    if lengths.count(length) == count:
        run = _dense_run(data, first, length, count)
        if run is not None:
            return [run]
    places = accumulate(lengths[:-1], initial=first)
    ids = [message_id for (message_id,) in map(_RAW_ID.unpack_from, repeat(data), places)]
    run = _dense_run(b"".join(ids), 0, MESSAGE_ID_BYTES, count)
    if run is not None:
        return [run]
    # With several subjects, the ids of one producer are not in the order of the records.
    ids.sort()
    run = _dense_run(b"".join(ids), 0, MESSAGE_ID_BYTES, count)
    return [run] if run is not None else _joined([int.from_bytes(each) for each in ids])


def _dense_run(data: bytes, first: int, stride: int, count: int) -> IdRun | None:
    """The run formed by the ids at every `stride` bytes from `first` on; None if they form none.

    Also None if more than the last two bytes of the counter change, which happens in about one frame of a hundred.
    """
    instance, counter = _ID.unpack_from(data, first)
    low = counter % _LOW_END
    after = low + count
    if after > _LOW_END:
        return None
    columns = _id_columns(first, stride, count)(data)
    # The last column first, because it reveals other orders.
    if columns[-1] != _LAST_BYTES[low:after] or columns[-2] != _OTHER_BYTES[low:after]:
        return None
    if columns[:_SAME_BYTES] != _same_columns(data[first : first + _SAME_BYTES], count):
        return None
    return IdRun(instance, counter, counter + count)


@lru_cache(maxsize=64)
def _id_columns(first: int, stride: int, count: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Cuts ids that follow each other at every `stride` bytes into columns of bytes."""
    after = first + (count - 1) * stride + 1
    return itemgetter(
        *(slice(first + place, after + place, stride) for place in range(MESSAGE_ID_BYTES))
    )


@lru_cache(maxsize=16)
def _same_columns(head: bytes, count: int) -> tuple[bytes, ...]:
    """The columns of ids that all begin with `head`; a producer's are the same 65,536 times."""
    return tuple([byte * count for byte in map(_SINGLE.__getitem__, head)])


def _joined(keys: Sequence[int]) -> list[IdRun]:
    """Runs of sorted ids, each id one number of 128 bits."""
    breaks = [
        index
        for index, (key, following) in enumerate(pairwise(keys), start=1)
        if following != key + 1 or not following & _COUNTER_MAX
    ]
    return [
        IdRun(keys[first] >> 64, keys[first] & _COUNTER_MAX, (keys[after - 1] & _COUNTER_MAX) + 1)
        for first, after in pairwise([0, *breaks, len(keys)])
    ]
