"""Outcomes become the fewest ranges, each once, whatever order they come in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from qmq_client.consumer.delivery import ACKED, Received, nacked, nacked_untried, rejected
from qmq_client.consumer.ledger import Ledger, as_ranges, stale_entries
from qmq_client.wire.requests import Extend, Nack, Reject, Settlement


def received(pull_sequence: int, token: int = 1) -> Received:
    return Received(
        subject="s",
        token=token,
        sequence=pull_sequence,
        pull_sequence=pull_sequence,
        attempt=1,
        record=bytes(36),
        lease_ends_at_s=30.0,
    )


@given(st.lists(st.integers(0, 60)))
def test_ranges_hold_exactly_their_numbers_and_never_touch(numbers: list[int]) -> None:
    ranges = as_ranges(numbers)
    assert [n for first, after in ranges for n in range(first, after)] == sorted(set(numbers))
    assert all(one[1] < other[0] for one, other in pairwise(ranges))


def test_outcomes_are_told_apart_by_token_kind_delay_and_text() -> None:
    ledger = Ledger()
    ledger.add([received(3), received(1), received(2)], ACKED)
    ledger.add([received(9, token=2)], ACKED)
    ledger.add([received(4), received(5)], nacked("no", 10))
    ledger.add([received(6)], nacked("no"))
    ledger.add([received(12)], nacked_untried("no"))
    ledger.add([received(7), received(8)], rejected("never"))
    ledger.extend([received(10), received(11)], 5_000)
    assert ledger.drain().settlements == (
        Settlement(
            token=1,
            acks=((1, 4),),
            nacks=(
                Nack(range=(4, 6), delay_ms=10, error="no"),
                Nack(range=(6, 7), error="no"),
                Nack(range=(12, 13), delay_ms=0, error="no", was_begun=False),
            ),
            rejects=(Reject(range=(7, 9), reason="never"),),
            extends=(Extend(range=(10, 12), lease_ms=5_000),),
        ),
        Settlement(token=2, acks=((9, 10),)),
    )
    assert len(ledger) == 0


def test_the_first_outcome_of_a_delivery_is_the_only_one() -> None:
    ledger = Ledger()
    one = received(1)
    assert ledger.add([one], ACKED) == 1
    assert ledger.add([one], nacked("late")) == 0
    assert ledger.drain().settlements == (Settlement(token=1, acks=((1, 2),)),)


def test_a_lease_is_not_prolonged_once_there_is_an_outcome() -> None:
    ledger = Ledger()
    one = received(1)
    ledger.extend([one], 5_000)
    ledger.add([one], ACKED)
    ledger.extend([one], 5_000)
    assert ledger.drain().settlements == (Settlement(token=1, acks=((1, 2),)),)


def test_what_could_not_be_sent_is_sent_first_next_time() -> None:
    ledger = Ledger()
    ledger.add([received(1)], ACKED)
    unsent = ledger.drain()
    ledger.add([received(5)], ACKED)
    ledger.put_back(unsent, is_uncertain=False)
    assert [one.received.pull_sequence for one in ledger.drain().entries] == [1, 5]


def test_a_refusal_is_reported_for_what_was_surely_not_done_before() -> None:
    ledger = Ledger()
    one, other, running = received(1), received(2), received(3)
    ledger.add([one], ACKED)
    ledger.put_back(ledger.drain(), is_uncertain=True)
    ledger.add([other], ACKED)
    ledger.extend([running], 5_000)
    sent = ledger.drain()
    outcomes, extensions = stale_entries(sent, [(1, 0, 10)])
    assert [entry.received for entry in outcomes] == [other]
    assert [entry.received for entry in extensions] == [running]
    ledger.add([running], ACKED)
    assert stale_entries(sent, [(1, 3, 4)]) == ([], [])


def test_what_may_have_been_done_once_stays_so_whatever_became_of_later_sends() -> None:
    ledger = Ledger()
    ledger.add([received(1)], ACKED)
    ledger.put_back(ledger.drain(), is_uncertain=True)
    ledger.put_back(ledger.drain(), is_uncertain=False)  # the broker was busy, for one
    assert stale_entries(ledger.drain(), [(1, 1, 2)]) == ([], [])


def test_a_refusal_of_a_range_without_end_is_bounded_work() -> None:
    ledger = Ledger()
    one = received(1)
    ledger.add([one], ACKED)
    outcomes, _ = stale_entries(ledger.drain(), [(1, 0, 2**62)])
    assert [entry.received for entry in outcomes] == [one]


def test_a_ledger_wakes_who_waits_for_it() -> None:
    ledger = Ledger()
    assert not ledger.wait(0)
    ledger.add([received(1)], ACKED)
    assert ledger.wait(0)
    ledger.drain()
    assert not ledger.wait(0)
