"""How the tests of the contract ask a transport, in few words."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

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
#: For a test that waits for its end, and does nothing before.
SHORT_LEASE_MS = 300
#: For a test that has to do something before its end; see `within_a_lease`.
_LEASES_MS: Final = (SHORT_LEASE_MS, 1_000, 3_000, 10_000)
#: A pull that must get something waits for it this long before the test fails.
WAIT_MS = 15_000
_Result = TypeVar("_Result")


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


def within_a_lease(subject: str, ask: Callable[[str, int], _Result]) -> tuple[str, int, _Result]:
    """Do what has to be done before a lease ends, or a delay: with one that was long enough for it.

    `ask` gets a subject that nobody used and the milliseconds. Returns those of the time that counts,
    and what `ask` returned. The longer ones are tried only where the machine stood still in between.
    """
    for lease_ms in _LEASES_MS:
        name, began_at_s = f"{subject}.{lease_ms}", time.monotonic()
        result = ask(name, lease_ms)
        if (time.monotonic() - began_at_s) * 1000 < lease_ms - 2:  # both clocks may be rounded
            return name, lease_ms, result
    raise AssertionError(f"no {_LEASES_MS[-1]} ms were enough")


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
