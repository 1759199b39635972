"""Whose turn it is: rows of a key in the order of their commits, others as they come."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.outbox.row import OutboxRow
from qmq_client.publishing.ordering import (
    HELD_MS,
    HELD_MS_MAX,
    Pair,
    WaitsForWatchdog,
    accepted_pairs,
    order_batch,
    order_rows,
)
from tests.wire.hostile import examples


def row(number: int, key: str | None = "k", subject: str = "s") -> OutboxRow:
    return OutboxRow(
        message_id=number.to_bytes(16),
        subject=subject,
        ordering_key=key,
        record=b"",
    )


def ids(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16) for number in numbers]


def numbers(rows: Sequence[OutboxRow]) -> list[int]:
    return [int.from_bytes(each.message_id) for each in rows]


class Outbox:
    """Answers as an outbox would that holds these rows."""

    def __init__(self, rows: Sequence[OutboxRow]) -> None:
        self.rows = rows
        self.questions = 0

    def waiting_before(self, pairs: Sequence[Pair]) -> dict[Pair, list[bytes]]:
        self.questions += 1
        found: dict[Pair, list[bytes]] = {}
        for each in sorted(self.rows, key=lambda each: each.message_id):
            if each.ordering_key is not None and (each.subject, each.ordering_key) in pairs:
                found.setdefault((each.subject, each.ordering_key), []).append(each.message_id)
        return found


def test_O4_rows_without_a_key_are_free_and_cost_no_question() -> None:
    outbox = Outbox([])
    ordered = order_batch([row(2, None), row(1, None)], outbox)
    assert (numbers(ordered.ready), ordered.held, outbox.questions) == ([2, 1], [], 0)


def test_O4_rows_of_a_key_go_in_the_order_of_their_commits() -> None:
    ordered = order_rows(
        [row(3), row(9, None), row(1), row(7, "other"), row(2)],
        {("s", "k"): ids(1, 2, 3), ("s", "other"): ids(7)},
    )
    assert (numbers(ordered.ready), ordered.held) == ([1, 9, 2, 7, 3], [])


def test_O4_a_row_waits_for_an_earlier_one_that_is_not_in_the_batch() -> None:
    ordered = order_rows([row(1), row(3), row(4)], {("s", "k"): ids(1, 2, 3, 4)})
    assert numbers(ordered.ready) == [1]
    assert [(numbers([each.row]), each.place) for each in ordered.held] == [([3], 2), ([4], 3)]


def test_O4_a_key_belongs_to_its_subject() -> None:
    ordered = order_rows(
        [row(2, subject="a"), row(3, subject="b")],
        {("a", "k"): ids(1, 2), ("b", "k"): ids(3)},
    )
    assert numbers(ordered.ready) == [3]


def test_O4_accepted_rows_that_are_not_deleted_yet_stop_nobody() -> None:
    outbox = Outbox([row(1), row(2)])
    assert numbers(order_batch([row(2)], outbox).ready) == []
    assert numbers(order_batch([row(2)], outbox, accepted=set(ids(1))).ready) == [2]


def test_O4_a_row_that_is_not_there_any_more_is_held() -> None:
    ordered = order_rows([row(5)], {})
    assert ([numbers([each.row]) for each in ordered.held], ordered.ready) == ([[5]], [])


def test_O4_held_rows_are_given_back_without_an_attempt_and_later_the_further_they_wait() -> None:
    outcome = order_rows([row(2), row(9)], {("s", "k"): ids(1, 2, 3, 4, 5, 9)}).returned()
    assert [each.is_attempt for each in outcome.failed] == [False, False]
    first, last = (each.delay_ms for each in outcome.failed)
    assert HELD_MS < first < last < HELD_MS_MAX
    far = order_rows([row(10**6)], {("s", "k"): ids(*range(100_000))}).returned()
    assert far.failed[0].delay_ms == HELD_MS_MAX


@examples(200)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([None, "k", "l"])), max_size=20),
    st.randoms(use_true_random=False),
)
def test_O4_whatever_batch_is_sent_no_row_passes_an_earlier_one_of_its_key(
    shape: list[tuple[str, str | None]], random: object
) -> None:
    import random as random_module

    assert isinstance(random, random_module.Random)
    stored = [row(i, key, subject) for i, (subject, key) in enumerate(shape)]
    left, sent = list(stored), []
    for _ in range(200):
        if not left:
            break
        batch = random.sample(left, random.randint(1, len(left)))
        ordered = order_batch(batch, Outbox(left))
        assert sorted(
            numbers(ordered.ready) + numbers([each.row for each in ordered.held])
        ) == sorted(numbers(batch))
        sent += ordered.ready
        left = [each for each in left if each not in ordered.ready]
    else:
        raise AssertionError("no end")
    for pair in {(each.subject, each.ordering_key) for each in sent if each.ordering_key}:
        of_pair = [each for each in sent if (each.subject, each.ordering_key) == pair]
        assert numbers(of_pair) == sorted(numbers(of_pair))


def test_O4_keys_whose_other_rows_are_not_free_are_followed() -> None:
    ordered = order_rows(
        [row(1), row(2, "other"), row(4, "last")],
        {("s", "k"): ids(1, 3), ("s", "other"): ids(2), ("s", "last"): ids(0, 4)},
    )
    assert ordered.followed == {("s", "k"), ("s", "last")}


def test_O4_what_waits_behind_accepted_rows_is_due() -> None:
    rows = [row(1), row(2, "other"), row(3, None), row(4, "k", "t")]
    assert accepted_pairs(rows, ids(1, 3, 4)) == {("s", "k"), ("t", "k")}


def test_O4_that_keys_wait_for_a_watchdog_is_logged_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits = WaitsForWatchdog()
    for number in range(100):
        waits.returned([row(number, f"order-{number}")])
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 7
    assert "messages=64 wait for an earlier one" in caplog.text
    assert "which another process has: 's order-63'" in caplog.text
