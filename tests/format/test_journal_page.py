"""The page about journals says what the storage does."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_broker.storage.files import journal
from qmq_broker.storage.ids import journal as id_journal
from qmq_broker.storage.queues import entry_chunk
from tests.format.pages import check_array, check_example, marks, read_page, rows
from tests.golden.version_1 import golden

PAGE = "journal.md"


def widths(name: str) -> list[tuple[str, str]]:
    return [(row[0], row[1]) for row in rows(marks(PAGE, "fields")[name])]


def test_head_and_chunk_are_the_structs_of_the_code() -> None:
    assert widths("head") == [("0", "8"), ("8", "16"), ("24", "8"), ("32", "4"), ("36", "4")]
    assert journal._HEAD.format == ">8s16sQ4x"
    assert journal._HEAD.size + journal._CRC.size == journal.JOURNAL_HEAD_BYTES == 40
    assert widths("chunk")[:3] == [("0", "8"), ("8", "4"), ("12", "4")]
    assert journal._CHUNK.format == ">QI"
    assert journal._CHUNK.size + journal._CRC.size == journal.CHUNK_HEAD_BYTES == 16
    assert widths("ids")[:4] == [("0", "8"), ("8", "8"), ("16", "8"), ("24", "4")]
    assert id_journal._FIXED.format == ">QQQI"
    assert id_journal._SUBJECT.format == ">IB"


def test_the_numbers_and_magics_on_the_page_are_those_of_the_code() -> None:
    page = read_page(PAGE)
    assert f"once it is {journal.FILE_BYTES // 2**20} MiB long" in page
    assert f"whenever {id_journal.CHUNK_RUNS:,} runs wait" in page
    for directory, magic in journal.MAGICS.items():
        assert f"{directory}/<20 digits>" in page
        assert f"`{magic.decode()}`" in page


@pytest.mark.parametrize(
    ("name", "kind"),
    [("EntryChunk", entry_chunk.EntryChunk), ("EntryRun", entry_chunk.EntryRun)],
)
def test_an_array_on_the_page_is_the_struct_of_the_code(name: str, kind: Any) -> None:
    check_array(PAGE, name, kind)


@pytest.mark.parametrize("name", ["journal_ids_version_2", "journal_entries"])
def test_the_worked_example_shows_the_golden_bytes(name: str) -> None:
    check_example(PAGE, name, golden(name))
