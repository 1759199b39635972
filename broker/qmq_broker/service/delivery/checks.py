"""Checks of pull and settle requests against names and limits, before any state is touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UNSET, UnsetType

from qmq_broker.service.limits import ServiceLimits
from qmq_client.wire.errors import InvalidMessageError, TooLargeError
from qmq_client.wire.names import check_name, check_not_own
from qmq_client.wire.requests import Backoff, PullRequest, Settlement, SettleRequest, Tags
from qmq_client.wire.start import StartKind, parse_start


def check_pull(request: PullRequest, limits: ServiceLimits) -> None:
    """Raise `InvalidMessageError` naming the field and the limit it breaks.

    Limits of a pull that are too large (messages, bytes, wait) are not refused but lowered where
    they are used: the request only gives an upper limit.
    """
    _check_names(request)
    _check_number("max_messages", request.max_messages, 1, 2**63 - 1)
    _check_number("max_bytes", request.max_bytes, 1, 2**63 - 1)
    _check_number("lease_ms", request.lease_ms, limits.lease_ms_min, limits.lease_ms)
    check_attempts(request.max_attempts, limits)
    if request.start != StartKind.EARLIEST:
        parse_start(request.start)
    if request.tags is not UNSET:
        check_tags(request.tags, limits)
    if request.backoff is not UNSET:
        check_backoff(request.backoff, limits)
    _check_settlements(request.settlements, limits)


def check_settle(request: SettleRequest, limits: ServiceLimits) -> None:
    """Raise `InvalidMessageError` naming the field and the limit it breaks."""
    _check_names(request)
    _check_settlements(request.settlements, limits)


def check_tags(tags: Tags | UnsetType, limits: ServiceLimits) -> None:
    """Raise `InvalidMessageError` unless these may be the tags of a filter."""
    if tags is UNSET:
        return
    named = (*tags.any, *tags.all)
    for tag in named:
        check_name(tag, field="tags")
    if len(named) > limits.filter_tags:
        raise TooLargeError(
            field="tags",
            limit=f"{limits.filter_tags} tags",
            value=f"{len(named)} tags",
            remedy="Name fewer tags.",
        )


def check_attempts(attempts: int | UnsetType, limits: ServiceLimits) -> None:
    """Raise `InvalidMessageError` unless a group may have this many attempts."""
    if attempts is not UNSET:
        _check_number("max_attempts", attempts, 1, limits.attempts)


def check_backoff(backoff: Backoff | UnsetType, limits: ServiceLimits) -> None:
    """Raise `InvalidMessageError` unless a group may wait this long."""
    if backoff is not UNSET:
        _check_number("backoff.max_ms", backoff.max_ms, 0, limits.backoff_ms)
        _check_number("backoff.first_ms", backoff.first_ms, 0, backoff.max_ms)


def _check_names(request: PullRequest | SettleRequest) -> None:
    check_not_own(check_name(request.subject, field="subject"))
    check_name(request.group, field="group")
    check_name(request.consumer, field="consumer")


def _check_settlements(settlements: Iterable[Settlement], limits: ServiceLimits) -> None:
    count = 0
    for settlement in settlements:
        for first, next_ in ranges_of(settlement):
            count += 1
            if first >= next_:
                raise InvalidMessageError(
                    field="range",
                    limit="first below next",
                    value=f"{first} to {next_}",
                    remedy="Give `next` as one more than the last of the range.",
                )
        for nack in settlement.nacks:
            _check_number("delay_ms", nack.delay_ms or 0, 0, limits.nack_delay_ms)
        for extend in settlement.extends:
            _check_number("lease_ms", extend.lease_ms, limits.lease_ms_min, limits.lease_ms)
    if count > limits.settlement_ranges:
        raise TooLargeError(
            field="settlements",
            limit=f"{limits.settlement_ranges} ranges",
            value=f"{count} ranges",
            remedy="Join neighbouring ranges, or send several requests.",
        )


def ranges_of(settlement: Settlement) -> Iterator[tuple[int, int]]:
    """All ranges that the settlement names."""
    yield from settlement.acks
    yield from (nack.range for nack in settlement.nacks)
    yield from (reject.range for reject in settlement.rejects)
    yield from (extend.range for extend in settlement.extends)


def _check_number(field: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise InvalidMessageError(
            field=field,
            limit=f"{lowest} to {highest}",
            value=str(value),
            remedy=f"Give a {field} within these bounds.",
        )
