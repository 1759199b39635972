"""Bugs to be planted in the product: each breaks one promise at one seam, and the worlds must find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.crash.planted_writing import messages_visible_before_the_sync, retention_asks_no_keeper
from tests.simulation import planted_broker as broker
from tests.simulation import planted_clients as clients
from tests.simulation.plan import Kind, Plan, Trouble

Plant = Callable[[pytest.MonkeyPatch], None]


class Bug(NamedTuple):
    """One bug, and which worlds can meet it at all."""

    plant: Plant
    suits: Callable[[Plan], bool] = lambda plan: True


def with_trouble(*wanted: Trouble) -> Callable[[Plan], bool]:
    """Worlds in which one of these goes wrong."""
    return lambda plan: any(trouble in plan.troubles for trouble in wanted)


def with_group(kind: Kind, *wanted: Trouble) -> Callable[[Plan], bool]:
    """Worlds with such a group, in which one of these goes wrong."""
    return lambda plan: (
        any(group.kind is kind for group in plan.groups)
        and (not wanted or with_trouble(*wanted)(plan))
    )


def _is_full_often(plan: Plan) -> bool:
    is_often = plan.trouble_every_ms == 400 and len(plan.troubles) <= 3
    return is_often and Trouble.FULL_DISK in plan.troubles


def _has_archive(plan: Plan) -> bool:
    return plan.has_archive


def _is_forced_with_archive(plan: Plan) -> bool:
    return Trouble.FORCE in plan.troubles and plan.has_archive and plan.has_retention


def _is_forced_with_retention(plan: Plan) -> bool:
    return Trouble.FORCE in plan.troubles and plan.has_retention


def _is_deadly(plan: Plan) -> bool:
    return plan.is_poison_deadly


BUGS: dict[str, Bug] = {
    "answered before the sync": Bug(broker.nothing_is_synced),
    "visible before it is durable": Bug(
        messages_visible_before_the_sync, with_trouble(Trouble.SLOW_DISK)
    ),
    "the publisher deletes on 503 and silence": Bug(
        clients.what_a_busy_broker_refuses_is_taken_for_sent
    ),
    "a hint is believed": Bug(clients.hints_are_believed, with_trouble(Trouble.COMMITS)),
    "rows pass earlier ones of their key": Bug(
        clients.rows_pass_earlier_ones_of_their_key, lambda plan: plan.is_ordered
    ),
    "leases are not fenced": Bug(broker.late_settlements_are_called_taken),
    "applied before the journal": Bug(broker.groups_change_before_the_journal_knows),
    "at most once before its sync": Bug(
        broker.at_most_once_is_answered_before_the_sync, with_group(Kind.ONCE, Trouble.HAND_OUT_CUT)
    ),
    "pauses are forgotten": Bug(broker.pauses_are_not_written, with_trouble(Trouble.PAUSE)),
    "attempts are not counted": Bug(
        broker.attempts_are_not_counted, lambda plan: plan.poison_rest is not None
    ),
    "what comes back untried is counted": Bug(
        broker.what_comes_back_untried_is_counted, with_trouble(Trouble.DATABASE)
    ),
    "suspects come with others": Bug(broker.suspects_come_with_others, _is_deadly),
    "others come behind a suspect": Bug(broker.others_come_behind_a_suspect, _is_deadly),
    "keys have no queues": Bug(broker.keys_have_no_queues, with_group(Kind.ORDERED)),
    "expired messages are given": Bug(broker.nothing_expires, lambda plan: plan.has_expiry),
    "repeats are stored": Bug(broker.repeats_are_not_recognised),
    "the window of ids is short": Bug(
        broker.fewer_ids_are_known_than_is_promised, lambda plan: plan.has_retention
    ),
    "delayed messages are released twice": Bug(broker.a_release_is_done_again),
    "delayed messages are early": Bug(broker.delayed_messages_are_due_at_once),
    "cancellations are only answered": Bug(
        broker.cancellations_are_only_answered, lambda plan: plan.has_delays
    ),
    "the inbox row in another transaction": Bug(clients.the_inbox_commits_by_itself),
    "acked before it is handled": Bug(clients.outcomes_are_noted_before_the_handler),
    "retention asks no group": Bug(broker.retention_asks_no_group, lambda plan: plan.has_retention),
    "keepers are only answered": Bug(broker.keepers_are_only_answered, _has_archive),
    "retention asks no keeper": Bug(retention_asks_no_keeper, _has_archive),
    "removed keepers come back": Bug(
        broker.removed_keepers_come_back, with_trouble(Trouble.REMOVAL)
    ),
    "what keepers lose is forgotten": Bug(
        broker.what_keepers_lose_is_forgotten, _is_forced_with_archive
    ),
    "what groups lose is not counted": Bug(
        broker.what_groups_lose_is_not_counted, _is_forced_with_retention
    ),
    "a full disk stays full": Bug(broker.room_is_looked_for_once, _is_full_often),
    "replays are only answered": Bug(
        broker.replays_are_only_answered, lambda plan: plan.poison_rest is not None
    ),
    "a broadcast's consumers are forgotten": Bug(
        broker.consumers_of_a_broadcast_go_at_once, with_group(Kind.CROWD)
    ),
    "long retries never end": Bug(broker.long_retries_never_end, lambda plan: plan.has_long_waits),
    "read-only takes messages": Bug(
        broker.a_read_only_broker_takes_messages, with_trouble(Trouble.READ_ONLY)
    ),
    "a send without transaction is not committed": Bug(
        clients.sends_outside_a_transaction_are_not_committed, lambda plan: plan.has_send_now
    ),
    "dedupe keys make no ids": Bug(clients.dedupe_keys_make_no_ids, lambda plan: plan.has_repeats),
    "settled by hand, acked with the batch": Bug(
        clients.what_is_settled_by_hand_is_acked_with_its_batch, with_group(Kind.BATCH)
    ),
    "the inbox keeps what was given back": Bug(
        clients.the_inbox_keeps_what_was_given_back, with_group(Kind.BATCH)
    ),
    "a cancelled handler counts as done": Bug(
        clients.cancelled_handlers_count_as_done, with_group(Kind.ASYNC)
    ),
}
