"""The pages about files on disk say what the storage does: fields, tags, names, examples."""

from __future__ import annotations

import re
from typing import Any, get_args

import msgspec
import pytest

from qmq_broker.options import SEGMENT_BYTES, StoreOptions
from qmq_broker.service.delivery import snapshot
from qmq_broker.storage import recovery
from qmq_broker.storage.files import checkpoint, format_file, keepers, retained, snapshots
from qmq_broker.storage.files.small_file import unseal
from qmq_broker.storage.logs import lost
from qmq_broker.storage.logs import segments as segment_files
from qmq_broker.storage.queues import consume_queue, queue_table
from qmq_broker.storage.queues.queue_files import ENTRY_BYTES
from qmq_broker.storage.schedule import bucket as schedule_bucket
from qmq_broker.storage.schedule import cancelled
from qmq_broker.storage.upkeep import quarantine_report
from qmq_client.group.actions import Action
from tests.format.pages import (
    PAGES,
    box,
    check_example,
    fields,
    marks,
    packed,
    read_page,
    rows,
)
from tests.golden.version_1 import golden

EXAMPLES = {
    "segment.md": "segment_sealed",
    "consume-queue.md": "queue_entries",
    "action-log.md": "actions_frame",
    "checkpoint.md": "checkpoint_slot",
    "keepers.md": "keepers",
}


def test_the_segment_head_is_the_struct_of_the_code() -> None:
    assert fields("segment.md", "segment head") == packed(segment_files._HEAD_BODY.format)
    assert segment_files.SEGMENT_HEAD_BYTES == 88


def test_the_entry_is_the_struct_of_the_code_and_the_box_of_its_module() -> None:
    table = fields("consume-queue.md", "entry")
    assert table == packed(consume_queue._ENTRY.format)
    assert table == box(consume_queue.__doc__)
    assert sum(width for _, width in table) == ENTRY_BYTES
    page = read_page("consume-queue.md")
    entries = StoreOptions().queue_entries_per_file
    assert f"({entries:,} by default: {entries * ENTRY_BYTES:,} bytes)" in page


def test_the_checkpoint_slot_is_the_struct_of_the_code() -> None:
    table = fields("checkpoint.md", "slot")
    head = packed(checkpoint._FIELDS.format)
    assert table[: len(head)] == head
    head_bytes = checkpoint._FIELDS.size
    crc_offset = checkpoint.SLOT_BYTES - checkpoint._CRC.size
    assert table[len(head) :] == [(head_bytes, crc_offset - head_bytes), (crc_offset, 4)]
    drawn = box(checkpoint.__doc__)
    assert drawn[0] == table[0]
    assert drawn[-2:] == table[-2:]


@pytest.mark.parametrize(
    ("page", "name", "kind"),
    [
        ("consume-queue.md", "QueueTable", queue_table.QueueTable),
        ("consume-queue.md", "QueueState", queue_table.QueueState),
        ("schedule.md", "ScheduleTable", schedule_bucket.ScheduleTable),
        ("schedule.md", "BucketState", schedule_bucket.BucketState),
        ("schedule.md", "Cancelled", cancelled.Cancelled),
        ("retained.md", "Retained", retained.Retained),
        ("keepers.md", "KeeperTable", keepers.KeeperTable),
        ("keepers.md", "Keeper", keepers.Keeper),
        ("quarantine.md", "LostRun", lost.LostRun),
        ("snapshot.md", "Snapshot", snapshots.Snapshot),
        ("snapshot.md", "SnapshotImage", snapshot.SnapshotImage),
        ("snapshot.md", "GroupImage", snapshot.GroupImage),
    ],
)
def test_an_array_on_a_page_is_the_struct_of_the_code(page: str, name: str, kind: Any) -> None:
    table = rows(marks(page, "array")[name])
    assert [row[1].strip("`") for row in table] == list(kind.__struct_fields__)
    assert [int(row[0]) for row in table] == list(range(len(table)))
    assert kind.__struct_config__.array_like


@pytest.mark.parametrize(
    ("name", "kind"), [("FORMAT", format_file._Written), ("CLEAN", recovery.CleanStop)]
)
def test_an_object_on_a_page_is_the_struct_of_the_code(name: str, kind: Any) -> None:
    table = rows(marks("format-file.md", "object")[name])
    assert [row[0].strip("`") for row in table] == list(kind.__struct_fields__)


def test_the_report_on_its_page_is_the_struct_of_the_code() -> None:
    table = rows(marks("quarantine.md", "object")["QuarantineReport"])
    fields_there = [row[0].strip("`") for row in table]
    assert fields_there == list(quarantine_report.QuarantineReport.__struct_fields__)


def test_the_table_of_actions_has_every_tag_and_field_of_the_code() -> None:
    table = [
        (int(row[0]), row[1].strip("`"), row[2].split(", "))
        for row in rows(marks("action-log.md", "actions")[""])
    ]
    kinds = sorted(get_args(Action), key=lambda kind: kind.__struct_config__.tag)
    assert table == [
        (kind.__struct_config__.tag, kind.__name__, list(kind.__struct_fields__)) for kind in kinds
    ]
    assert all(kind.__struct_config__.array_like for kind in kinds)


@pytest.mark.parametrize("page", EXAMPLES)
def test_a_worked_example_shows_the_golden_bytes(page: str) -> None:
    assert set(marks(page, "example")) == {EXAMPLES[page]}
    check_example(page, EXAMPLES[page], golden(EXAMPLES[page]))


def test_the_worked_example_of_a_small_file_is_the_golden_file() -> None:
    shown = "\n".join(marks("format-file.md", "text")["format_file"]) + "\n"
    assert shown.encode() == golden("format_file")
    content = unseal(shown.encode())
    assert content is not None
    assert msgspec.json.decode(content)["version"] == format_file.FORMAT_VERSION


def test_the_lengths_of_segments_on_the_page_are_the_defaults() -> None:
    assert (SEGMENT_BYTES, StoreOptions().action_segment_bytes) == (2**30, 64 * 2**20)
    assert "(1 GiB for the commit\nlog, 64 MiB for the action log)" in read_page("segment.md")


def test_the_index_lists_every_page_and_every_page_says_good_and_bad() -> None:
    pages = {path.name for path in PAGES.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[([a-z-]+\.md)\]", read_page("README.md"), re.M)) == pages
    for page in pages:
        text = read_page(page)
        for heading in ("## Good and bad", "- Good: ", "- Bad: "):
            assert heading in text, f"{page}: {heading}"
        assert "```\n" in text, f"{page} shows no grammar"
