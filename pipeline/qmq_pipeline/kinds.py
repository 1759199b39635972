"""What a column of a table is: its name, its kind and its meaning; and what Spark and Arrow call the kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

#: Our name of a type → Spark's in DDL and Arrow's.
KINDS: Final[dict[str, tuple[str, pa.DataType]]] = {
    "text": ("STRING", pa.string()),
    "texts": ("ARRAY<STRING>", pa.list_(pa.string())),
    "pairs": ("MAP<STRING, STRING>", pa.map_(pa.string(), pa.string())),
    "bytes": ("BINARY", pa.binary()),
    "long": ("BIGINT", pa.int64()),
    "int": ("INT", pa.int32()),
    "double": ("DOUBLE", pa.float64()),
    "flag": ("BOOLEAN", pa.bool_()),
    "time": ("TIMESTAMP", pa.timestamp("us", tz="UTC")),
    "day": ("DATE", pa.date32()),
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    name: str
    #: A key of `KINDS`.
    kind: str
    meaning: str
