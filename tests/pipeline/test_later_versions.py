"""A log that a later version wrote is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from qmq_broker.storage.files.small_file import unseal
from qmq_broker.storage.logs.actions import KIND_MAX
from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import FrameKind, build_frame, build_message_frame, parse_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import encode_record
from qmq_pipeline.errors import LaterVersionError
from qmq_pipeline.places.options import parse_log_options
from qmq_pipeline.sources.log_batches import batch_reader
from tests.broker.storage.later import stamped_as, with_flags
from tests.pipeline.test_log import fill, reader, whole
from tests.pipeline.world import DataDirectory, messages


@pytest.mark.parametrize(("field", "what"), [(4, "version 2"), (5, "kind 99")])
@pytest.mark.parametrize("number", [1, -1])
def test_P1_what_a_later_version_wrote_is_refused_and_not_called_damaged(
    directory: DataDirectory, number: int, field: int, what: str
) -> None:
    fill(directory, 200)
    log = reader(directory)
    bounds = log.bounds()
    path = directory.path / "commitlog" / f"{0:020d}"
    path.write_bytes(stamped_as(number, field, int(what.split()[1]))(path.read_bytes()))
    for read in (
        lambda: list(log.frames(LogRange(bounds.first_offset, bounds.next_offset))),
        lambda: whole(reader(directory)),
    ):
        with pytest.raises(LaterVersionError, match=f"{what}.*Use that version here, too"):
            read()


def later_flags(directory: DataDirectory) -> None:
    records = [encode_record(one) for one in messages(MessageIds(1), 3, subjects=("orders",))]
    records[1] = with_flags(records[1], 0b10000)
    frame = build_message_frame({"orders": records})
    directory.store.append([parse_message_frame(frame)])
    directory.store.commit_and_step()


def later_action(directory: DataDirectory) -> None:
    content = msgspec.msgpack.encode([[KIND_MAX + 1, 5, "orders", "billing"]])
    body = struct.pack(">I", len(content)) + content
    directory.store.actions.log.append([(build_frame(FrameKind.ACTIONS, body, record_count=1), ())])
    directory.store.actions.sync()


def later_format(directory: DataDirectory) -> None:
    path = directory.path / "FORMAT"
    content = unseal(path.read_bytes())
    assert content is not None
    new = content.replace(b"}", b',"compression":"zstd"}')
    path.write_bytes(new + b"\ncrc32c %08x\n" % crc32c(new))


#: What a later version did, which table shows it, and what is said.
LATER: dict[str, tuple[Callable[[DataDirectory], None], str, str]] = {
    "flags of a record": (later_flags, "messages", "flags 0x10"),
    "an action": (later_action, "actions", f"kind {KIND_MAX + 1}"),
    "a field of FORMAT": (later_format, "messages", "compression"),
}


@pytest.mark.parametrize("what", LATER)
def test_B13_a_table_of_what_a_later_version_wrote_is_refused_and_nothing_is_touched(
    tmp_path: Path, what: str
) -> None:
    write, table, says = LATER[what]
    directory = DataDirectory(tmp_path / "broker")
    fill(directory, 10)
    write(directory)
    directory.settle()
    directory.close()
    files = [one for one in directory.path.rglob("*") if one.is_file()]
    before = {one: one.read_bytes() for one in files}
    options = {"path": str(directory.path), "table": table}
    with pytest.raises(LaterVersionError, match=f"{says}.*Use that version here, too"):
        read_all(options)
    assert {one: one.read_bytes() for one in files} == before


def read_all(options: dict[str, str]) -> list[pa.RecordBatch]:
    made = batch_reader(parse_log_options(options))
    return [
        batch
        for part in made.partitions()
        for batch in made.read(part)
        if isinstance(batch, pa.RecordBatch)
    ]
