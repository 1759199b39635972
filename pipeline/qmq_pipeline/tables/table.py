"""A table: its name, its columns and their types, and their names in Spark and Arrow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pyarrow as pa

#: QMQ's name of a type → its name in Spark's DDL.
KINDS: Final = {
    "text": "STRING",
    "texts": "ARRAY<STRING>",
    "pairs": "MAP<STRING, STRING>",
    "bytes": "BINARY",
    "long": "BIGINT",
    "int": "INT",
    "double": "DOUBLE",
    "flag": "BOOLEAN",
    "time": "TIMESTAMP",
    "day": "DATE",
}


@cache
def arrow_kinds() -> dict[str, pa.DataType]:
    """QMQ's name of a type → Arrow's type. Arrow is imported here, because a process that only
    returns a schema does not need it.
    """
    import pyarrow as pa

    return {
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "pairs": pa.map_(pa.string(), pa.string()),
        "bytes": pa.binary(),
        "long": pa.int64(),
        "int": pa.int32(),
        "double": pa.float64(),
        "flag": pa.bool_(),
        "time": pa.timestamp("us", tz="UTC"),
        "day": pa.date32(),
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

    def without(self, names: Collection[str]) -> list[Column]:
        """The columns that are not among these."""
        return [column for column in self.columns if column.name not in names]

    def ddl(self, names: Sequence[str] | None = None) -> str:
        """The schema in Spark's DDL: all columns, or the named ones in the order given."""
        by_name = {column.name: column for column in self.columns}
        chosen = [by_name[name] for name in names or self.names]
        return ", ".join(f"`{column.name}` {KINDS[column.kind]}" for column in chosen)

    def nothing(self) -> str:
        """A query without rows, which Spark recognizes as empty, so that joins with it cost nothing."""
        kinds = (f"CAST(NULL AS {KINDS[one.kind]}) AS `{one.name}`" for one in self.columns)
        return f"SELECT {', '.join(kinds)} LIMIT 0"

    def arrow(self, names: Sequence[str] | None = None) -> pa.Schema:
        """The same for Arrow."""
        import pyarrow as pa

        kinds = {column.name: arrow_kinds()[column.kind] for column in self.columns}
        return pa.schema([(name, kinds[name]) for name in names or self.names])
