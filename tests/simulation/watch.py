"""Who sees what the broker of a life gives away, takes and replays: before anybody else hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from qmq_broker.service.broker import Broker
from qmq_broker.service.delivery.delivery import HandOut, Settled
from qmq_client.group.settling import Stale
from qmq_client.wire.operations import DeadAnswer, DeadRequest
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest

#: A hand-out, for those who judge: request, what was given, broker's time of delivery.
OnHandOut = Callable[[PullRequest, HandOut, int], None]
#: A request with outcomes that were taken, and those of them that were not.
OnSettled = Callable[[PullRequest | SettleRequest, Sequence[Stale]], None]
#: A wish for a replay, and the sequences of all dead letters of its group.
OnReplay = Callable[[DeadRequest, tuple[int, ...]], None]


class Watch(NamedTuple):
    """Who sees what the broker does, before anybody hears of it."""

    on_hand_out: OnHandOut
    on_settled: OnSettled
    on_replay: OnReplay


def let_see(broker: Broker, watch: Watch) -> None:
    """Show what each pull is given, what is settled, and what is replayed."""
    delivery, changes = broker.delivery, broker.changes
    pull, slices, replay = delivery.pull, delivery.slices, changes.replay_some

    def watched_slices(
        request: PullRequest | SettleRequest, settled: Settled
    ) -> Iterator[Settlement]:
        yield from slices(request, settled)
        watch.on_settled(request, settled.stale)

    def watched_pull(
        request: PullRequest, now_ms: int, stale: tuple[Stale, ...] = (), *, owner: str = ""
    ) -> HandOut | None:
        given = pull(request, now_ms, stale, owner=owner)
        if given is not None:
            watch.on_hand_out(request, given, now_ms)
        return given

    def watched_replay(
        request: DeadRequest, now_ms: int, count_max: int
    ) -> tuple[DeadAnswer, int | None]:
        state = delivery.group(request.subject, request.group)
        watch.on_replay(request, () if state is None else tuple(sorted(state.dead)))
        return replay(request, now_ms, count_max)

    # mypy knows them for methods
    setattr(delivery, "slices", watched_slices)  # noqa: B010
    setattr(delivery, "pull", watched_pull)  # noqa: B010
    setattr(changes, "replay_some", watched_replay)  # noqa: B010
