"""Bronze tables made without Spark, for tests of what follows from them: in a test, `ingest` takes seconds.

The readers of both sources, which Spark would drive, are driven here; pyarrow writes what they give. `test_bronze.py`
proves that the tables are those of `ingest`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs.ingest import INGEST, Ingested, Streams
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import parse_log_options
from qmq_pipeline.places.outbox_options import parse_outbox_options
from qmq_pipeline.sources.log_stream import LogStreamReader
from qmq_pipeline.sources.outbox_stream import OutboxStreamReader
from qmq_pipeline.tables.schemas import ACTIONS, LOG, OUTBOX, PROGRESS, SPANS
from qmq_pipeline.tables.table import Table
from tests.pipeline.rows import Row, rows_of

#: Where each source has come to, which a checkpoint would tell.
_STATE = "direct.json"


def write_bronze(config: PipelineConfig) -> Ingested:
    """What `ingest` would write now; may be called again when more has come, and not between its runs."""
    return _Writer(config).run()


class _Writer:
    def __init__(self, config: PipelineConfig) -> None:
        self._tables = config.tables
        self._streams = Streams(None, config, job=INGEST)  # type: ignore[arg-type]  # only options are asked for
        self._state = Path(config.tables) / PROGRESS.layer / _STATE
        known = self._state.exists()
        self._ends: dict[str, Any] = json.loads(self._state.read_text()) if known else {}
        self._rows: dict[str, int] = {}

    def run(self) -> Ingested:
        """Read each source to its end, and note it as `ingest` does."""
        notes = dict[str, Any]()
        scanned: dict[str, int] = {}
        names = self._streams.names()
        if OUTBOX.name in names:
            scanned = self._outbox()
        if COMMIT_LOG in names:
            self._ends["read_at_ms"] = SYSTEM_CLOCK.now_ms()
            self._log(ACTION_LOG, ACTIONS)
            self._log(COMMIT_LOG, LOG)
            self._spans()
        if ends := self._ends.get(OUTBOX.name):
            notes["scans"] = {name: one["scanned_at_ms"] for name, one in ends.items()}
        for log, table in ((ACTION_LOG, ACTIONS), (COMMIT_LOG, LOG)):
            if log in self._ends:
                notes[log] = self._ends[log]["offset"]
                notes["store_id"] = self._ends[log]["store_id"]
            parts = [row["part"] for row in rows_of(self._tables, table)]
            notes.setdefault("parts", {})[log] = max(parts, default=0)
        if "read_at_ms" in self._ends:
            notes["read_at_ms"] = self._ends["read_at_ms"]
        self._write(PROGRESS, [{"at": None, "notes": json.dumps(notes), "job": INGEST}])
        self._state.write_text(json.dumps(self._ends))
        return Ingested(rows=self._rows, outbox=scanned)

    def _log(self, name: str, table: Table) -> None:
        reader = LogStreamReader(parse_log_options(self._streams.log_options(table)))
        before = self._ends.get(name, {}).get("offset", 0)
        place = "action_offset" if table is ACTIONS else "physical_offset"
        rows = self._read(name, reader)
        for row in rows:
            kind = row.get("kind", "actions").replace("message", "messages")
            if row[place] >= before:
                self._rows[kind] = self._rows.get(kind, 0) + 1
        self._write(table, rows)
        reader.stop()

    def _outbox(self) -> dict[str, int]:
        options = parse_outbox_options(self._streams.outbox_options(), os.environ, OUTBOX.names)
        rows = self._read(OUTBOX.name, OutboxStreamReader(options))
        key = ("database", "row_id", "message_id")
        known = rows_of(self._tables, OUTBOX)
        sent = {tuple(row[name] for name in key) for row in known if row["state"] == "sent"}
        news = [
            row
            for row in rows
            if row["state"] != "sent" or tuple(row[name] for name in key) not in sent
        ]
        self._write(OUTBOX, news, name=f"scan-{len(known)}")
        counts = dict.fromkeys(self._ends[OUTBOX.name], 0)
        for row in news:
            counts[row["database"]] += 1
        return counts

    def _read(self, name: str, reader: LogStreamReader | OutboxStreamReader) -> list[Row]:
        start = self._ends.get(name) or reader.initialOffset()
        end = reader.latestOffset(start)
        found: Iterable[pa.RecordBatch] = ()
        if end != start:
            parts = reader.partitions(start, end)
            found = [batch for part in parts for batch in reader.read(part)]
        self._ends[name] = end
        return [row for batch in found for row in batch.to_pylist()]

    def _spans(self) -> None:
        spans: dict[tuple[int, str], Row] = {}
        for row in rows_of(self._tables, LOG):
            if row["kind"] in ("message", "lost"):
                _add(spans, row)
        self._write(SPANS, spans.values())

    def _write(self, table: Table, rows: Iterable[Mapping[str, Any]], name: str = "made") -> None:
        data = pa.Table.from_pylist(list(rows), schema=table.arrow())
        if not data.num_rows:
            return
        schema = pa.schema([table.arrow().field(one) for one in table.partitions])
        ds.write_dataset(
            data,
            Path(self._tables) / table.layer / table.name,
            format="parquet",
            partitioning=ds.partitioning(schema, flavor="hive"),
            basename_template=f"{name}-{{i}}.parquet",
            existing_data_behavior="overwrite_or_ignore",
        )


def _add(spans: dict[tuple[int, str], Row], row: Row) -> None:
    first = row["sequence"]
    after = first + (row["count"] if row["kind"] == "lost" else 1)
    key = (row["part"], row["subject"])
    new = {"subject": row["subject"], "part": row["part"], "messages": 0, "lost": 0}
    new |= {"first_sequence": first, "next_sequence": after}
    new |= {"first_at": row["stored_at"], "last_at": row["stored_at"]}
    span = spans.setdefault(key, new)
    span["lost" if row["kind"] == "lost" else "messages"] += after - first
    span["first_sequence"] = min(span["first_sequence"], first)
    span["next_sequence"] = max(span["next_sequence"], after)
    for name, pick in (("first_at", min), ("last_at", max)):
        span[name] = pick(one for one in (span[name], row["stored_at"]) if one is not None)
