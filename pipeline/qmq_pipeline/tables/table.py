"""A table: its name, its columns and their kinds, and how Spark and Arrow call these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

#: Our name of a type → its names in Spark's DDL and in Arrow.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table."""

    name: str
    #: bronze, silver, gold or audit.
    layer: str
    version: int
    #: Columns that together identify one row.
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    #: Columns that are folders of its files.
    partitions: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names in order."""
        return tuple(column.name for column in self.columns)

    def ddl(self, names: Sequence[str] | None = None) -> str:
        """The schema in Spark's DDL: all columns, or the named ones in the order given."""
        by_name = {column.name: column for column in self.columns}
        chosen = [by_name[name] for name in names or self.names]
        return ", ".join(f"`{column.name}` {KINDS[column.kind][0]}" for column in chosen)

    def nothing(self) -> str:
        """A query without rows, which Spark knows to be empty: joins with it cost nothing."""
        kinds = (f"CAST(NULL AS {KINDS[one.kind][0]}) AS `{one.name}`" for one in self.columns)
        return f"SELECT {', '.join(kinds)} LIMIT 0"

    def arrow(self, names: Sequence[str] | None = None) -> pa.Schema:
        """The same for Arrow."""
        by_name = {column.name: column for column in self.columns}
        chosen = [by_name[name] for name in names or self.names]
        return pa.schema([(column.name, KINDS[column.kind][1]) for column in chosen])
