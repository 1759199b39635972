"""Tables in an object store: written by pyarrow, read by Spark through a file system of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS
from tests.pipeline.object_store import object_store

BUCKET = "bucket"


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_tables_are_written_listed_replaced_and_swept_in_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    (tmp_path / BUCKET).mkdir()
    with object_store(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        lake = Lake(f"{scheme}://{BUCKET}/some/tables")
        with pytest.raises(LakeError, match="there are no tables here"):
            lake.require()
        lake.prepare()
        lake.require()
        table = AUDIT_FINDINGS
        row = pa.RecordBatch.from_pylist([dict.fromkeys(table.names)], schema=table.arrow())
        with lake.writing():
            files = [lake.write(table, f"{name}.parquet", [row]) for name in ("one", "two")]
            facts = RangeFacts(source="s", first=0, next=1, rows=1, files=(files[0],))
            lake.commit(table, [facts], name="first")
            assert lake.sweep(table) == 1
        assert [one.files for one in lake.ranges(table)] == [(files[0],)]
        (found,) = lake.read_file(table, "one.parquet", ["kind"])
        assert found.num_rows == files[0].rows == 1
        folder = lake.folder(table)
        assert lake.url(folder) == f"{scheme}://{BUCKET}/some/tables/{folder}"
    here = tmp_path / BUCKET / "some" / "tables" / folder
    assert sorted(one.name for one in here.rglob("*.parquet")) == ["one.parquet"]


def test_P2_a_try_that_fails_in_an_object_store_leaves_what_another_one_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / BUCKET).mkdir()
    table = AUDIT_FINDINGS
    row = pa.RecordBatch.from_pylist([dict.fromkeys(table.names)], schema=table.arrow())

    def failing() -> Iterator[pa.RecordBatch]:
        yield row
        raise OSError("the broker is gone")

    with object_store(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        lake = Lake(f"s3://{BUCKET}/tables")
        lake.prepare()
        lake.write(table, "one.parquet", [row, row])
        for name in ("one.parquet", "two.parquet"):
            with pytest.raises(OSError, match="the broker is gone"):
                lake.write(table, name, failing())
        assert sum(one.num_rows for one in lake.read_file(table, "one.parquet", ["kind"])) == 2
    here = tmp_path / BUCKET / "tables" / lake.folder(table)
    assert [one.name for one in here.rglob("*.parquet")] == ["one.parquet"]
