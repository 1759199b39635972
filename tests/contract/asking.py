"""How the tests of the contract ask a transport, in few words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qmq_client.ids import MESSAGE_IDS
from qmq_client.transport.port import Transport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.record import Record, decode_record, encode_record
from qmq_client.wire.requests import (
    Nack,
    PullRequest,
    Range,
    SettleAnswer,
    Settlement,
    SettleRequest,
)

#: Long enough that a lease never ends by itself in a test that does not wait for it.
LONG_LEASE_MS = 60_000
#: Short, yet longer than two requests take on a busy machine.
SHORT_LEASE_MS = 300
#: A pull that must get something waits for it this long before the test fails.
WAIT_MS = 15_000


def record_of(subject: str, body: bytes, message_id: bytes | None = None, **fields: Any) -> bytes:
    given = {"born_at_ms": 1_700_000_000_000, **fields}
    made = message_id or MESSAGE_IDS.next_id()
    return encode_record(Record(message_id=made, subject=subject, body=body, **given))


def frame_of(subject: str, *bodies: bytes, **fields: Any) -> bytes:
    return build_message_frame({subject: [record_of(subject, body, **fields) for body in bodies]})


def pull(
    transport: Transport,
    subject: str,
    *,
    group: str = "group",
    consumer: str = "one",
    max_messages: int = 100,
    wait_ms: int = 0,
    lease_ms: int = LONG_LEASE_MS,
    max_attempts: int = 16,
    start: str = "earliest",
    settlements: Sequence[Settlement] = (),
    **settings: Any,
) -> Deliveries:
    return transport.pull(
        PullRequest(
            subject=subject,
            group=group,
            consumer=consumer,
            max_messages=max_messages,
            wait_ms=wait_ms,
            lease_ms=lease_ms,
            max_attempts=max_attempts,
            start=start,
            settlements=tuple(settlements),
            **settings,
        )
    )


def settle(
    transport: Transport,
    subject: str,
    settlement: Settlement,
    *,
    group: str = "group",
    consumer: str = "one",
    **settings: Any,
) -> SettleAnswer:
    return transport.settle(
        SettleRequest(
            subject=subject,
            group=group,
            consumer=consumer,
            settlements=(settlement,),
            **settings,
        )
    )


def bodies(deliveries: Deliveries) -> list[bytes]:
    subject = deliveries.head.subject
    return [decode_record(subject, one.record).body for one in deliveries.messages]


def span(deliveries: Deliveries) -> Range:
    pulls = [one.pull_sequence for one in deliveries.messages]
    return pulls[0], pulls[-1] + 1


def acks(deliveries: Deliveries) -> Settlement:
    return Settlement(token=deliveries.head.token, acks=(span(deliveries),))


def nacks(deliveries: Deliveries, *, delay_ms: int | None) -> Settlement:
    return Settlement(
        token=deliveries.head.token,
        nacks=(Nack(range=span(deliveries), delay_ms=delay_ms, error="failed"),),
    )
