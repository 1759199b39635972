"""The requests of one consumer, made from its options.

Options that were not set are left out of the bytes, so that a broker which does not know them is
not asked.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from qmq_client.consumer.identity import Identity
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.wire import requests


def pull_request(
    options: ConsumerOptions,
    identity: Identity,
    *,
    max_messages: int,
    wait_ms: int,
    settlements: tuple[requests.Settlement, ...] = (),
) -> requests.PullRequest:
    """Ask for messages, and tell what became of earlier ones."""
    return requests.PullRequest(
        subject=options.subject,
        group=options.group,
        consumer=identity.name,
        max_messages=max_messages,
        wait_ms=wait_ms,
        lease_ms=options.lease_ms,
        max_attempts=options.max_attempts,
        start=str(options.start),
        settlements=settlements,
        tags=_tags(options),
        ordered=options.ordered or UNSET,
        at_most_once=options.at_most_once or UNSET,
        broadcast=_member(options, identity),
        backoff=_backoff(options),
    )


def settle_request(
    options: ConsumerOptions, consumer_id: str, settlements: tuple[requests.Settlement, ...]
) -> requests.SettleRequest:
    """Tell what became of messages."""
    return requests.SettleRequest(
        subject=options.subject,
        group=options.group,
        consumer=consumer_id,
        settlements=settlements,
        broadcast=_broadcast(options),
    )


def _tags(options: ConsumerOptions) -> requests.Tags | UnsetType:
    if not options.tags and not options.all_tags:
        return UNSET
    return requests.Tags(any=options.tags, all=options.all_tags)


def _broadcast(options: ConsumerOptions) -> Any:
    if not options.broadcast:
        return UNSET
    return "named" if options.broadcast == "named" else "ephemeral"


def _member(options: ConsumerOptions, identity: Identity) -> requests.BroadcastMember | UnsetType:
    if not options.broadcast:
        return UNSET
    return requests.BroadcastMember(kind=_broadcast(options), instance=identity.instance)


def _backoff(options: ConsumerOptions) -> requests.Backoff | UnsetType:
    if options.backoff is None:
        return UNSET
    return requests.Backoff(
        first_ms=options.backoff.first_ms,
        factor=options.backoff.factor,
        max_ms=options.backoff.max_ms,
    )
