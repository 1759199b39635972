"""What became of each message, folded from the action log; `test_fold_oracle.py` compares with the broker's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from qmq_client.group.actions import (
    Acked,
    Action,
    Configured,
    Dead,
    Ended,
    Expired,
    GroupDefined,
    GroupSettings,
    Keyed,
    Nacked,
    Passed,
    Pulled,
    Replayed,
    Skipped,
    Sought,
)
from qmq_client.wire.deliveries import DeliveryRun
from qmq_pipeline.fold.blocks import Block
from qmq_pipeline.fold.steps import IDLE_KINDS, NEVER_GIVEN, STEPS, GroupMark, GroupSteps, Step
from qmq_pipeline.rows.actions import action_rows
from qmq_pipeline.tables.schemas import DELIVERIES

AT_MS = 1_700_000_000_000


class Fold:
    """One group, folded from an earlier state or from the beginning on."""

    def __init__(self, mark: GroupMark | None = None, known: pa.Table | None = None) -> None:
        self._group = GroupSteps(mark)
        self._known = DELIVERIES.arrow().empty_table() if known is None else known
        self._steps: list[Step] = []

    @property
    def mark(self) -> GroupMark:
        return self._group.mark

    def feed(self, actions: Sequence[Action]) -> None:
        for action in actions:
            for row in action_rows(action):
                at = round(row["at"].timestamp() * 1_000_000)
                self._steps += self._group.of({**_NOTHING, **row, "at": at})

    def rows(self) -> pa.Table:
        if not self._steps and not self._known.num_rows:
            return self._known
        steps = pa.Table.from_pylist([one._asdict() for one in self._steps], schema=STEPS.arrow())
        block = Block.of(steps, self._known)
        block.apply_all(steps)
        rows = block.rows("orders", "billing", 0, 0)
        rows.validate(full=True)
        return rows


def folded(actions: Sequence[Action]) -> dict[int, Mapping[str, Any]]:
    """sequence → what the fold says of it."""
    fold = Fold()
    fold.feed(actions)
    return rows_of(fold)


def rows_of(fold: Fold) -> dict[int, Mapping[str, Any]]:
    return {row["sequence"]: row for row in fold.rows().to_pylist()}


_NOTHING = dict.fromkeys(
    [
        "consumer",
        "first_sequence",
        "next_sequence",
        "first_pull",
        "next_pull",
        "attempt",
        "reason",
        "error",
        "action_json",
    ]
)


def pulled(at: int, first_pull: int, *runs: tuple[int, int, int], consumer: str = "c1") -> Pulled:
    made = tuple(DeliveryRun(*run) for run in runs)
    return Pulled(AT_MS + at, "orders", "billing", consumer, 1, first_pull, made, AT_MS + at + 1)


def acked(at: int, first: int, after: int, consumer: str = "c1") -> Acked:
    return Acked(AT_MS + at, "orders", "billing", consumer, first, after)


def nacked(at: int, first: int, after: int, retry: int = 1, error: str = "no") -> Nacked:
    return Nacked(AT_MS + at, "orders", "billing", "c1", first, after, retry, error)


def outcomes(found: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    return {sequence: row["outcome"] for sequence, row in found.items()}


DEFINED = GroupDefined(AT_MS, "orders", "billing", 0, 5)
FILTERING = Configured(AT_MS, "orders", "billing", GroupSettings(any_tags=("red",)))


def test_a_message_goes_from_delivery_to_settlement_with_its_times() -> None:
    found = folded([DEFINED, pulled(10, 0, (0, 3, 1)), acked(25, 0, 2), nacked(30, 2, 3)])
    first = found[0]
    delivered, settled = first["first_delivered_at"], first["settled_at"]
    assert (settled - delivered).total_seconds() * 1000 == 15
    assert outcomes(found) == {0: "acked", 1: "acked", 2: "returned"}
    assert (found[2]["error"], found[2]["settled_at"]) == ("no", None)


def test_a_redelivery_counts_and_keeps_the_first_time() -> None:
    found = folded(
        [
            DEFINED,
            pulled(10, 0, (0, 1, 1)),
            nacked(11, 0, 1),
            pulled(500, 1, (0, 1, 2)),
            acked(501, 1, 2),
        ]
    )
    assert (found[0]["attempts"], found[0]["outcome"], found[0]["error"]) == (2, "acked", "no")
    assert (found[0]["last_delivered_at"] - found[0]["first_delivered_at"]).total_seconds() == 0.49


def test_what_came_back_untried_comes_in_the_same_attempt_beside_new_messages() -> None:
    untried = msgspec.structs.replace(nacked(11, 1, 2), was_tried=False)
    found = folded(
        [
            DEFINED,
            pulled(10, 0, (0, 2, 1)),
            untried,
            pulled(20, 2, (1, 2, 1)),
            acked(21, 0, 1),
            acked(21, 2, 4),
        ]
    )
    assert outcomes(found) == dict.fromkeys(range(3), "acked")
    assert [one["attempts"] for one in found.values()] == [1, 1, 1]


def test_a_dead_letter_stays_dead_when_its_hand_out_ends_and_lives_again_when_replayed() -> None:
    dead: list[Action] = [
        DEFINED,
        pulled(1, 0, (0, 2, 5)),
        Dead(AT_MS + 2, "orders", "billing", 0, 5, "attempts", "boom"),
        Expired(AT_MS + 2, "orders", "billing", "c1", 0, 1, 0),
    ]
    found = folded(dead)
    assert (found[0]["outcome"], found[0]["reason"], found[0]["error"]) == (
        "dead",
        "attempts",
        "boom",
    )
    again = folded([*dead, Replayed(AT_MS + 9, "orders", "billing", 0, 1)])
    assert (again[0]["outcome"], again[0]["settled_at"]) == ("returned", None)


def test_what_a_group_never_gets_is_said() -> None:
    found = folded(
        [
            DEFINED,
            FILTERING,
            pulled(1, 0, (2, 1, 1)),
            Passed(AT_MS + 2, "orders", "billing", 5),
            Skipped(AT_MS + 3, "orders", "billing", 5, 7),
            Sought(AT_MS + 4, "orders", "billing", 10),
        ]
    )
    assert outcomes(found) == {
        **dict.fromkeys((0, 1, 3, 4), "filtered"),
        **dict.fromkeys((2, 5, 6, 7, 8, 9), "skipped"),
    }
    assert (found[5]["reason"], found[8]["reason"]) == ("deleted by force", "skipped by a seek")


def test_messages_that_wait_for_their_key_are_not_taken_for_filtered_ones() -> None:
    keyed: list[Action] = [
        Keyed(AT_MS + 1, "orders", "billing", 4, (0, 2, 3), (7, 7, 0)),
        Keyed(AT_MS + 2, "orders", "billing", 6, (5,), (7,)),
    ]
    found = folded([DEFINED, FILTERING, *keyed, pulled(3, 0, (0, 1, 1))])
    waiting = dict.fromkeys((2, 3, 5), "waiting")
    assert outcomes(found) == {0: "in flight", 1: "filtered", 4: "filtered", **waiting}


def test_settlements_of_hand_outs_before_the_table_begins_are_counted_and_left_out() -> None:
    fold = Fold()
    fold.feed([acked(1, 7, 9)])
    assert (rows_of(fold), fold.mark.unmatched) == ({}, 2)


def test_what_a_filter_passes_over_between_two_deliveries_is_not_for_the_group() -> None:
    history: list[Action] = [
        DEFINED,
        FILTERING,
        pulled(1, 0, (2, 1, 1), (5, 2, 1)),
        acked(2, 0, 3),
    ]
    fold = Fold()
    fold.feed(history)
    assert outcomes(rows_of(fold)) == {
        **dict.fromkeys((0, 1, 3, 4), "filtered"),
        **dict.fromkeys((2, 5, 6), "acked"),
    }
    assert (fold.mark.filter, fold.mark.was_refiltered) == ((("red",), ()), False)
    later = Configured(AT_MS, "orders", "billing", GroupSettings(all_tags=("blue",)))
    fold.feed([later])
    assert (fold.mark.filter, fold.mark.was_refiltered) == (((), ("blue",)), True)


def test_what_a_group_without_a_filter_comes_past_was_skipped() -> None:
    found = folded([DEFINED, pulled(1, 0, (2, 1, 1)), Passed(AT_MS + 2, "orders", "billing", 5)])
    assert outcomes(found) == {**dict.fromkeys((0, 1, 3, 4), "skipped"), 2: "in flight"}
    assert {found[one]["reason"] for one in (0, 1, 3, 4)} == {NEVER_GIVEN}
    unknown = folded([pulled(1, 0, (2, 1, 1)), pulled(2, 1, (5, 1, 1))])
    assert outcomes(unknown)[3] == "filtered", "its settings are older than the table"


def test_a_seek_back_begins_again_and_a_seek_ahead_skips() -> None:
    given: list[Action] = [DEFINED, pulled(1, 0, (0, 8, 1)), acked(2, 0, 6)]
    back = folded([*given, Sought(AT_MS + 3, "orders", "billing", 4)])
    assert outcomes(back) == dict.fromkeys(range(4), "acked")
    again = folded(
        [
            *given,
            Sought(AT_MS + 3, "orders", "billing", 4),
            pulled(9, 8, (4, 2, 1)),
            acked(10, 8, 10),
        ]
    )
    assert outcomes(again) == dict.fromkeys(range(6), "acked")
    assert again[5]["first_delivered_at"] == again[5]["last_delivered_at"]
    ahead = folded([*given, Sought(AT_MS + 3, "orders", "billing", 20)])
    assert outcomes(ahead) == {
        **dict.fromkeys(range(6), "acked"),
        **dict.fromkeys(range(6, 20), "skipped"),
    }


def test_a_group_that_ended_is_done_with_everything_and_may_begin_again() -> None:
    ended: list[Action] = [
        DEFINED,
        pulled(1, 0, (0, 3, 1)),
        acked(2, 0, 1),
        Ended(AT_MS + 3, "orders", "billing"),
    ]
    assert outcomes(folded(ended)) == {0: "acked", 1: "skipped", 2: "skipped"}
    again = folded(
        [*ended, GroupDefined(AT_MS + 9, "orders", "billing", 5, 5), pulled(9, 0, (5, 1, 1))]
    )
    assert outcomes(again) == {0: "acked", **dict.fromkeys(range(1, 5), "skipped"), 5: "in flight"}
    assert again[3]["reason"] == "while the group did not exist"


def test_a_kind_of_action_that_changes_no_message_is_known_as_such() -> None:
    assert set(IDLE_KINDS) == {"extended", "paused", "purged", "owned"}
