"""What the golden bytes of version 1 mean: the values that were encoded once into `v1/*.hex`.

The `.hex` files were written when version 1 was fixed and are never written again: data directories
and clients in the field hold such bytes. When a test here fails, the code is wrong, or a new version
with new files beside these is due.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from qmq_client.wire.deliveries import DeliveriesHead, DeliveryRun
from qmq_client.wire.record import BodyKind, Record
from qmq_client.wire.requests import (
    ErrorAnswer,
    Extend,
    Nack,
    PullRequest,
    Reject,
    SendAnswer,
    SettleAnswer,
    Settlement,
    SettleRequest,
    SubjectPlace,
)

FOLDER: Final = Path(__file__).parent / "v1"


def golden(name: str) -> bytes:
    """The bytes of one file; lines that begin with # say what they are."""
    lines = (FOLDER / f"{name}.hex").read_text(encoding="utf-8").splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))


_INSTANCE: Final = bytes.fromhex("0123456789abcdef")
#: 2013-01-01 09:57:00 UTC.
_BORN_AT_MS: Final = 1_357_034_220_000


def _id(counter: int) -> bytes:
    return _INSTANCE + counter.to_bytes(8, "big")


RECORDS: Final = {
    "record_plain": Record(
        message_id=_id(0), subject="flight.departed", body=b"\x00\xffhello", born_at_ms=_BORN_AT_MS
    ),
    "record_full": Record(
        message_id=_id(1),
        subject="flight.departed",
        body=b'{"flight":1545}',
        body_kind=BodyKind.JSON,
        key="N14228",
        tags=("severe", "weather"),
        headers=(("trace", "4bf92f35"), ("source", "EWR → IAH")),
        born_at_ms=_BORN_AT_MS,
    ),
    "record_text": Record(
        message_id=_id(2),
        subject="flight.delayed",
        body="Zürich – Genève".encode(),
        body_kind=BodyKind.TEXT,
        born_at_ms=_BORN_AT_MS,
    ),
    "record_json": Record(
        message_id=_id(3),
        subject="flight.departed",
        body=b"[1,null,true]",
        body_kind=BodyKind.JSON,
        born_at_ms=_BORN_AT_MS,
    ),
    "record_delayed": Record(
        message_id=_id(4),
        subject="flight.reminder",
        body=b"board",
        key="N14228",
        born_at_ms=_BORN_AT_MS,
        due_at_ms=_BORN_AT_MS + 3_600_000,
    ),
}

#: Frames, each with a test of its own.
FRAMES: Final = (
    "frame_messages",
    "frame_stamped",
    "frame_delayed",
    "frame_padding",
    "frame_deliveries",
)
#: Subject → records of `frame_messages`, in order.
FRAME_RUNS: Final = {
    "flight.departed": ("record_plain", "record_full", "record_json"),
    "flight.delayed": ("record_text",),
}
#: What `frame_stamped` was given by its log.
STAMP: Final = {
    "physical_offset": 4096,
    "stored_at_ms": _BORN_AT_MS + 17,
    "epoch": 3,
    "durable_offset": 4000,
    "first_sequences": (10, 0),
}

DELIVERIES_HEAD: Final = DeliveriesHead(
    subject="flight.departed",
    token=3,
    lease_ms=30_000,
    first_pull_sequence=7,
    runs=(
        DeliveryRun(first_sequence=10, count=2, attempt=1),
        DeliveryRun(first_sequence=4, count=1, attempt=2),
    ),
    stale=((2, 5, 6),),
)

_SETTLEMENT: Final = Settlement(
    token=3,
    acks=((7, 9),),
    nacks=(Nack(range=(9, 10), delay_ms=5000, error="TimeoutError"),),
    rejects=(Reject(range=(10, 11), reason="no such airport"),),
    extends=(Extend(range=(11, 12), lease_ms=60_000),),
)

CONTROLS: Final[dict[str, msgspec.Struct]] = {
    "control_send_answer": SendAnswer(
        frame_crc=0xDEADBEEF,
        count=4,
        duplicates=1,
        physical_offset=4096,
        stored_at_ms=_BORN_AT_MS + 17,
        durability="durable",
        places=(
            SubjectPlace(subject="flight.departed", first_sequence=10, count=3),
            SubjectPlace(subject="flight.delayed", first_sequence=0, count=1),
        ),
        message_ids=(_id(0).hex(),),
    ),
    "control_pull_request": PullRequest(
        subject="flight.departed",
        group="tallies",
        consumer="tallies-1",
        max_messages=500,
        wait_ms=20_000,
        settlements=(_SETTLEMENT,),
    ),
    "control_settle_request": SettleRequest(
        subject="flight.departed", group="tallies", consumer="tallies-1", settlements=(_SETTLEMENT,)
    ),
    "control_settle_answer": SettleAnswer(settled=4, stale=((2, 5, 6),)),
    "control_error_answer": ErrorAnswer(
        code="id_conflict",
        message="this id was stored before with another content",
        field="message_id",
        limit="one content for each id",
        value="0123456789abcdef0000000000000001",
        remedy="Send it under a new id.",
        message_id="0123456789abcdef0000000000000001",
    ),
}
