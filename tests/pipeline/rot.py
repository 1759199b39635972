"""What a disk does to a file of the tables: one bit of a column's values is another one, and nobody is told."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq


def turn_a_bit(path: Path, column: str) -> None:
    """Turn the last bit of the first values of a column."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = (group.column(number) for number in range(group.num_columns))
    found = next(one for one in columns if one.path_in_schema == column)
    begin = found.dictionary_page_offset or found.data_page_offset
    content = bytearray(path.read_bytes())
    content[begin + found.total_compressed_size - 1] ^= 1
    path.write_bytes(content)
