"""P4: bytes that are not those their producer made a checksum of are noted when they are read from the log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import msgspec

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_client.wire.checksum import crc32c
from qmq_client.wire.frame import FrameKind
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import MESSAGE_ID_POSITION, Record, encode_record, record_crc
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.rows.altered import ALTERED_MAX, altered_records
from qmq_pipeline.rows.decode import Piece, Selection, batches_by_subject
from qmq_pipeline.tables.commits import ALTERED, ALTERED_COUNT, RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import MESSAGES, SCHEDULED
from qmq_pipeline.work.ranges import ingest_range
from tests.pipeline.world import FAR_MS, START_MS, DataDirectory, messages, scanned, spoilt

SUBJECTS = ("orders", "flight.departed")


def ingested(directory: DataDirectory, tables: Path) -> dict[str, RangeFacts]:
    lake = Lake(str(tables))
    lake.prepare()
    whole = LogRange(0, directory.store.durable_offset)
    return ingest_range(Place(path=str(directory.path)), lake.root, COMMIT_LOG, whole)


def noted(record: Record, sequence: int | None, stored_at_ms: int) -> dict[str, object]:
    data = encode_record(record)
    content = spoilt(data)[MESSAGE_ID_POSITION:]
    return {
        "message_id": record.message_id.hex(),
        "subject": record.subject,
        "sequence": sequence,
        "stored_at_ms": stored_at_ms,
        "record_crc": record_crc(data),
        "found_crc": crc32c(content, crc32c(record.subject.encode())),
    }


def test_P4_records_whose_bytes_do_not_fit_their_checksum_are_noted_by_name(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    every = messages(MessageIds(1), 40, subjects=SUBJECTS)
    directory.spoilt = {every[number].message_id for number in (3, 17, 28)}
    directory.append(every, at_ms=START_MS, frame_records=16)
    facts = ingested(directory, tmp_path / "tables")[MESSAGES.name]
    directory.close()
    found = sorted(facts.notes[ALTERED], key=lambda one: str(one["message_id"]))
    assert found == [noted(every[number], number // 2, START_MS) for number in (3, 17, 28)]
    assert facts.notes[ALTERED_COUNT] == 3
    assert facts.rows == 40, "what is altered is a row like any other"


def test_an_altered_record_that_waits_for_its_time_has_no_sequence() -> None:
    due = [msgspec.structs.replace(one, due_at_ms=FAR_MS) for one in messages(MessageIds(2), 3)]
    records = [(one.subject, encode_record(one)) for one in due]
    records[1] = (due[1].subject, spoilt(records[1][1]))
    frame = scanned(records, kind=FrameKind.DELAYED)
    pieces: list[Piece] = []
    selection = Selection(table=SCHEDULED, columns=SCHEDULED.names)
    assert sum(one.num_rows for one in batches_by_subject([frame], selection, pieces.append)) == 3
    (piece,) = pieces
    found = [asdict(one) for one in altered_records(piece)]
    assert found == [noted(due[1], None, frame.header.stored_at_ms)]


def test_of_a_range_that_is_spoilt_as_a_whole_some_are_named_and_all_are_counted(
    tmp_path: Path,
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    every = messages(MessageIds(1), ALTERED_MAX + 150)
    directory.spoilt = {one.message_id for one in every}
    directory.append(every)
    notes = ingested(directory, tmp_path / "tables")[MESSAGES.name].notes
    directory.close()
    assert len(notes[ALTERED]) == ALTERED_MAX
    assert notes[ALTERED_COUNT] == ALTERED_MAX + 150


def test_a_sound_range_has_no_note_of_altered_records(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 20, subjects=SUBJECTS))
    notes = ingested(directory, tmp_path / "tables")[MESSAGES.name].notes
    directory.close()
    assert set(notes) == {"last_frame"}
