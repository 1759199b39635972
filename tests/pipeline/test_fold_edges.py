"""Histories that a broker writes seldom: what was settled, given up or sought once, and then happens again."""

from __future__ import annotations

from qmq_client.group.actions import (
    Action,
    BroughtBack,
    Dead,
    Ended,
    MovedBack,
    Replayed,
    SetAside,
    Skipped,
    Sought,
)
from tests.pipeline.test_fold import (
    AT_MS,
    DEFINED,
    Fold,
    acked,
    folded,
    nacked,
    outcomes,
    pulled,
    rows_of,
)

ENDED = Ended(AT_MS + 50, "orders", "billing")


def test_a_hand_out_that_is_known_in_part_is_settled_in_part_and_the_rest_counted() -> None:
    fold = Fold()
    fold.feed([DEFINED, pulled(1, 5, (0, 3, 1)), pulled(2, 10, (3, 1, 1)), acked(3, 3, 11)])
    assert outcomes(rows_of(fold)) == dict.fromkeys(range(4), "acked")
    assert fold.mark.unmatched == 4  # pulls 3 and 4 before them, 8 and 9 between
    assert fold.mark.held == {}


def test_a_redelivery_from_ahead_filters_nothing_on_the_way_there() -> None:
    found = folded([DEFINED, pulled(1, 0, (4, 1, 2)), pulled(2, 1, (0, 2, 1))])
    assert outcomes(found) == {4: "in flight", 0: "in flight", 1: "in flight"}


def test_what_is_delivered_once_more_after_its_ack_is_settled_no_longer() -> None:
    found = folded([DEFINED, pulled(1, 0, (0, 1, 1)), acked(2, 0, 1), pulled(3, 1, (0, 1, 2))])
    assert (found[0]["outcome"], found[0]["settled_at"]) == ("in flight", None)


def test_acks_that_come_after_the_group_ended_or_was_moved_settle_nothing() -> None:
    for change in (ENDED, Sought(AT_MS + 50, "orders", "billing", 2)):
        fold = Fold()
        fold.feed([DEFINED, pulled(1, 0, (0, 2, 1)), change, acked(60, 0, 2)])
        assert outcomes(rows_of(fold)) == {0: "skipped", 1: "skipped"}
        assert fold.mark.unmatched == 2


def test_a_dead_letter_replayed_behind_a_seek_ahead_is_given_up_with_the_group() -> None:
    lived: list[Action] = [
        DEFINED,
        pulled(1, 0, (0, 2, 1)),
        Dead(AT_MS + 2, "orders", "billing", 1, 1, "rejected", ""),
        acked(3, 0, 1),
        Sought(AT_MS + 4, "orders", "billing", 6),
        Replayed(AT_MS + 5, "orders", "billing", 1, 2),
    ]
    assert outcomes(folded(lived))[1] == "returned"
    found = folded([*lived, ENDED])
    assert (found[1]["outcome"], found[1]["reason"]) == ("skipped", "the group ended")


def test_messages_that_a_start_found_gone_give_their_sequences_to_others() -> None:
    """The acks of what was lost settle nothing that was stored later."""
    fold = Fold()
    moved = MovedBack(AT_MS + 5, "orders", "billing", 2, 0)
    fold.feed([DEFINED, pulled(1, 0, (0, 3, 1)), pulled(2, 3, (3, 2, 1)), acked(3, 1, 5), moved])
    assert outcomes(rows_of(fold)) == {0: "in flight", 1: "acked"}
    assert (fold.mark.come_to, fold.mark.to_json()["held"]) == (2, {"c1": [(0, 1, 0)]})
    fold.feed([pulled(6, 5, (2, 2, 1)), acked(7, 5, 6)])
    assert outcomes(rows_of(fold)) == {0: "in flight", 1: "acked", 2: "acked", 3: "in flight"}


def test_what_the_log_lost_behind_a_group_does_not_take_it_back() -> None:
    """What was handed out ahead of the loss still ends with the group."""
    lost = Skipped(AT_MS + 2, "orders", "billing", 0, 2)
    found = folded([DEFINED, pulled(1, 0, (0, 5, 1)), nacked(1, 0, 2), lost, ENDED])
    assert [one["reason"] for one in found.values()] == [
        *["deleted by force"] * 2,
        *["the group ended"] * 3,
    ]
    assert outcomes(found) == dict.fromkeys(range(5), "skipped")


def test_what_the_log_lost_while_a_consumer_has_it_is_in_flight_until_it_comes_back() -> None:
    lost = Skipped(AT_MS + 2, "orders", "billing", 0, 3)
    history: list[Action] = [DEFINED, pulled(1, 0, (0, 3, 1)), lost, acked(3, 0, 1)]
    assert outcomes(folded(history)) == {0: "acked", 1: "in flight", 2: "in flight"}
    again = Skipped(AT_MS + 5, "orders", "billing", 1, 3)
    found = folded([*history, nacked(4, 1, 2), again])
    assert outcomes(found) == {0: "acked", 1: "skipped", 2: "in flight"}


def test_a_second_long_retry_is_not_ended_by_the_first() -> None:
    found = folded(
        [
            DEFINED,
            pulled(1, 0, (0, 1, 1)),
            nacked(2, 0, 1),
            SetAside(AT_MS + 3, "orders", "billing", 0, 1, 7),
            BroughtBack(AT_MS + 4, "orders", "billing", 0, 44),
            SetAside(AT_MS + 5, "orders", "billing", 0, 1, 8),
        ]
    )
    assert (found[0]["outcome"], found[0]["redelivered_at"]) == ("long retry", None)
