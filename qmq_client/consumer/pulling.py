"""`pull`: one batch of messages, for code with its own loop.

::

    with pull("http://127.0.0.1:9470", subject="orders", group="audit") as deliveries:
        for delivery in deliveries:
            store(delivery.message.body)
            delivery.ack()

A delivery that was neither acked, nacked nor rejected by the end of the block is returned and
delivered again after the group's backoff; all outcomes go to the broker in one request. Only
`delivery.extend` extends a lease.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypedDict, Unpack, cast

from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.consumer.delivery import (
    Delivery,
    Outcome,
    Received,
    Settler,
    nacked,
    received_of,
    unreadable,
)
from qmq_client.consumer.identity import Identity
from qmq_client.consumer.ledger import Ledger, log_answer, pull_request, settle_request
from qmq_client.consumer.options import (
    PREFETCH_MAX,
    WAIT_MS_MAX,
    ConsumerOptions,
    Start,
    check_settings,
)
from qmq_client.errors import ConfigurationError, ProtocolError, TransportError
from qmq_client.message import decode_message
from qmq_client.retry import Backoff
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from qmq_client.transport.port import Transport, checked_transport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.requests import PullRequest

_UNSETTLED: Final = "left without an outcome"


class PullSettings(TypedDict, total=False):
    """The other keyword arguments of `pull`; `@consumer` describes each of them."""

    lease_ms: int
    max_attempts: int
    start: Start
    tags: str | Iterable[str]
    all_tags: str | Iterable[str]
    ordered: bool
    backoff: Backoff | None


@contextmanager
def pull(
    broker: str | BrokerAddress | Transport,
    *,
    subject: str,
    group: str,
    max_messages: int = 100,
    wait_s: float = 0.0,
    **settings: Unpack[PullSettings],
) -> Iterator[list[Delivery]]:
    """Up to `max_messages` deliveries, perhaps none after `wait_s`; settled when the block ends.

    ::

        with pull(url, subject="orders", group="audit", wait_s=5) as deliveries:
            for delivery in deliveries:
                store(delivery.message.body)
                delivery.ack()

    Every delivery needs its `ack`, `nack` or `reject`: one without counts as a failed attempt, and
    after `max_attempts` of them the message is a dead letter. `settings` are those of `@consumer` that
    concern the group: `lease_ms`, `max_attempts`, `start`, `tags`, `all_tags`, `ordered`, `backoff`.
    Malformed messages are rejected with that reason and not shown. Raises `ConfigurationError` for a
    value that cannot work, and `TransportError` when the broker does not answer, also at the end of
    the block: the leases then end by themselves.
    """
    check_settings(settings, PullSettings.__annotations__)
    _check_range("max_messages", max_messages, 1, PREFETCH_MAX)
    _check_range("wait_s", wait_s, 0, WAIT_MS_MAX / 1000)
    options = ConsumerOptions(
        subject=subject,
        group=group,
        wait_ms=round(wait_s * 1000),
        prefetch_max=max_messages,
        **cast(Any, settings),
    )
    if isinstance(broker, str | BrokerAddress):
        transport: Transport = _transport(broker)
    else:
        transport = checked_transport(broker)
    batch = _Batch(options, transport, SYSTEM_CLOCK)
    deliveries = batch.open(transport.pull(batch.request(max_messages)))
    try:
        yield deliveries
    finally:
        batch.close()


class _Batch:
    """The messages of one pull until their settlement."""

    def __init__(self, options: ConsumerOptions, transport: Transport, clock: Clock) -> None:
        self._options = options
        self._transport = transport
        self._clock = clock
        self._ledger = Ledger()
        self._received: list[Received] = []

    def request(self, max_messages: int) -> PullRequest:
        return pull_request(
            self._options,
            _identity(),
            max_messages=max_messages,
            wait_ms=self._options.wait_ms,
        )

    def open(self, deliveries: Deliveries) -> list[Delivery]:
        ends_at_s = self._clock.monotonic_s() + deliveries.head.lease_ms / 1000
        self._received = received_of(deliveries, ends_at_s)
        settler = Settler(settle=self._settle, extend=self._extend)
        opened: list[Delivery] = []
        for received in self._received:
            try:
                message = decode_message(received.subject, received.record)
            except ProtocolError as error:
                self._settle(received, unreadable(error))
            else:
                opened.append(Delivery(received, message, settler))
        return opened

    def close(self) -> None:
        self._ledger.add(self._received, nacked(_UNSETTLED))
        while len(self._ledger):
            self._send()

    def _settle(self, received: Received, outcome: Outcome) -> bool:
        return self._ledger.add([received], outcome) == 1

    def _extend(self, received: Received, lease_ms: int) -> None:
        self._ledger.extend([received], lease_ms)
        self._send()

    def _send(self) -> None:
        outgoing = self._ledger.drain()
        if not outgoing.entries:
            return
        request = settle_request(self._options, _identity().name, outgoing.settlements)
        try:
            answer = self._transport.settle(request)
        except TransportError:
            # A failed extension does not affect outcomes, which are sent at the end of the block.
            self._ledger.put_back(outgoing, is_uncertain=True)
            raise
        log_answer(self._options, outgoing, answer.stale)


def _check_range(setting: str, value: object, lowest: float, highest: float) -> None:
    if not isinstance(value, int | float) or not lowest <= value <= highest:
        raise ConfigurationError(
            setting=setting,
            value=repr(value),
            remedy=f"Give a number from {lowest:g} to {highest:g}.",
        )


@lru_cache(maxsize=16)
def _transport(broker: str | BrokerAddress) -> HttpTransport:
    made = HttpTransport(broker)
    atexit.register(made.close)  # kept for the next pull, so close it here
    return made


@lru_cache(maxsize=1)
def _identity() -> Identity:
    return Identity()
