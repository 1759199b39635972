"""A lake whose tables other programs read, which know nothing of it but Delta and Iceberg."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog

from qmq_pipeline.jobs.expose import Exposed, expose
from qmq_pipeline.places.config import ExposeOptions, PipelineConfig
from qmq_pipeline.tables.commits import DataFile
from qmq_pipeline.tables.delta import DeltaListing
from qmq_pipeline.tables.iceberg import IcebergListing
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.listing import Listing
from qmq_pipeline.tables.table import Table

CATALOG = "expose"
#: Of each kind of column a value.
VALUES: dict[str, Any] = {
    "text": "ä",
    "texts": ["red", "blue"],
    "pairs": [("tenant", "7")],
    "bytes": b"\x00\xff",
    "long": 2**40,
    "int": 7,
    "double": 0.5,
    "time": 1_760_000_000_123_456,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A lake, and programs that know nothing of it but Delta and Iceberg."""

    lake: Lake
    catalog: Catalog

    def expose(self, form: str, *tables: str) -> Exposed:
        options = ExposeOptions(
            format=form, catalog=CATALOG, catalog_properties=self.catalog.properties, tables=tables
        )
        return expose(PipelineConfig(tables=self.lake.root), options)

    def listing(self, form: str, table: Table, namespace: str = "qmq") -> Listing:
        if form == "delta":
            return DeltaListing(self.lake, table)
        return IcebergListing(self.lake, table, self.catalog, namespace)

    def read(self, form: str, table: Table) -> list[Row]:
        if form == "delta":
            rows = DeltaTable(self.lake.url(self.lake.folder(table))).to_pyarrow_table()
        else:
            rows = self.catalog.load_table(f"qmq.{table.name}").scan().to_arrow()
        assert rows.column_names == list(table.names)
        return in_order(rows.to_pylist())

    def committed(self, table: Table) -> list[Row]:
        paths = [file.path for one in self.lake.ranges(table) for file in one.files]
        folder = Path(self.lake.root, self.lake.folder(table))
        rows: list[Row] = []
        for path in paths:
            rows += pq.ParquetFile(folder / path).read().to_pylist()
        return in_order(rows)

    def versions(self, form: str, table: Table) -> int:
        if form == "delta":
            return DeltaTable(self.lake.url(self.lake.folder(table))).version() + 1
        return len(self.catalog.load_table(f"qmq.{table.name}").snapshots())

    def write(self, table: Table, path: str, numbers: range) -> DataFile:
        return self.lake.write(table, path, [batch(table, numbers)])

    def parts(self, table: Table, run: str, parts: Mapping[str, range]) -> None:
        """Make these parts anew, as a job does."""
        with self.lake.writing():
            self.lake.sweep(table)
            files = {
                part: [self.write(table, f"run={run}/part={part}/rows.parquet", numbers)]
                for part, numbers in parts.items()
            }
            self.lake.replace_parts(table, run, files, made=set(parts))


@contextmanager
def a_world(folder: Path, warehouse: Path) -> Iterator[World]:
    """A new lake, and a catalog with its warehouse there."""
    uri = f"sqlite:///{folder / 'catalog.db'}"
    catalog = SqlCatalog(CATALOG, uri=uri, warehouse=f"file://{warehouse}", type="sql")
    lake = Lake(str(folder / "tables"))
    lake.prepare()
    warehouse.mkdir(parents=True)
    yield World(lake, catalog)
    catalog.close()


def batch(table: Table, numbers: range) -> pa.RecordBatch:
    """Rows whose key tells their number; in each second one everything else is null."""
    rows = []
    for number in numbers:
        row = {column.name: VALUES[column.kind] if number % 2 else None for column in table.columns}
        rows.append({**row, "subject": f"subject {number % 3}", "sequence": number})
    return pa.RecordBatch.from_pylist(rows, schema=table.arrow())


def in_order(rows: list[Row]) -> list[Row]:
    plain = [{name: listed(value) for name, value in row.items()} for row in rows]
    return sorted(plain, key=lambda row: (row["subject"], row["sequence"]))


def listed(value: Any) -> Any:
    return (
        [tuple(one) if isinstance(one, list) else one for one in value]
        if isinstance(value, list)
        else value
    )
