"""The page about the key index says what the storage does."""

from __future__ import annotations

from typing import Any

import pytest

from qmq_broker.options import MIB, StoreOptions
from qmq_broker.storage.index import key_index, key_index_file, key_search
from qmq_broker.storage.index.key_index import ENTRIES_PER_SLOT
from qmq_broker.storage.index.key_index_file import INDEX_ENTRY_BYTES, INDEX_HEADER_BYTES
from tests.format.pages import (
    box,
    check_array,
    check_example,
    fields,
    packed,
    read_page,
)
from tests.golden.version_1 import golden

PAGE = "key-index.md"


def test_header_and_entry_are_the_structs_of_the_code() -> None:
    header = fields(PAGE, "header")
    assert header == packed(key_index_file._HEADER.format)
    assert header == box(key_index_file.__doc__)[: len(header)]
    assert fields(PAGE, "entry") == packed(key_index_file._ENTRY.format)
    assert (INDEX_HEADER_BYTES, INDEX_ENTRY_BYTES) == (40, 20)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("IndexTable", key_index.IndexTable), ("IndexFileState", key_index_file.IndexFileState)],
)
def test_an_array_on_the_page_is_the_struct_of_the_code(name: str, kind: Any) -> None:
    check_array(PAGE, name, kind)


def test_the_worked_example_shows_the_golden_bytes() -> None:
    check_example(PAGE, "index_sealed", golden("index_sealed"))


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    page = " ".join(read_page(PAGE).split())
    options = StoreOptions()
    for entries in (options.index_entries, 20_000_000):
        slots = entries // ENTRIES_PER_SLOT
        assert f"{INDEX_HEADER_BYTES + 4 * slots + INDEX_ENTRY_BYTES * entries:,} bytes" in page
    assert f"{options.index_entries:,} entries in {options.index_entries // 4:,} slots" in page
    assert f"At most {options.index_files:,} files" in page
    assert key_index.NOTE_BYTES == 256 * MIB == key_search.LOOKED_THROUGH_BYTES_MAX
