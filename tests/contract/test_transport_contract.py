"""What every transport and the broker behind it promise, asked of each of them."""

from __future__ import annotations

import threading

import pytest

from qmq_client.errors import BrokerRefusedError, TransportError
from qmq_client.ids import MESSAGE_IDS
from qmq_client.transport.port import Transport
from qmq_client.wire.deliveries import Deliveries
from qmq_client.wire.frame import build_message_frame, read_header
from qmq_client.wire.record import Record, encode_record
from qmq_client.wire.requests import (
    Backoff,
    Extend,
    Nack,
    PullRequest,
    Reject,
    SettleAnswer,
    Settlement,
    Tags,
)
from tests.contract.asking import (
    LONG_LEASE_MS,
    SHORT_LEASE_MS,
    WAIT_MS,
    acks,
    bodies,
    frame_of,
    nacks,
    pull,
    record_of,
    settle,
    span,
    within_a_lease,
)


@pytest.mark.parametrize("ordered", [False, True])
def test_C4_a_message_whose_attempts_are_used_up_by_a_lower_number_is_delivered_no_more(
    transport: Transport, subject: str, ordered: bool
) -> None:
    """It was delivered twice, and waits; with two attempts at most, a third would be one too many."""
    transport.send(frame_of(subject, b"bad", b"next", key="k"))
    for _ in range(2):
        got = pull(transport, subject, max_messages=1, ordered=ordered, wait_ms=WAIT_MS)
        assert bodies(got) == [b"bad"]
        settle(transport, subject, nacks(got, delay_ms=0))
    got = pull(transport, subject, max_attempts=2, ordered=ordered, wait_ms=WAIT_MS)
    assert bodies(got) == [b"next"]
    assert pull(transport, subject, max_attempts=2, ordered=ordered).messages == ()


def test_a_send_is_answered_with_the_name_of_its_frame(transport: Transport, subject: str) -> None:
    frame = frame_of(subject, b"a", b"b")
    answer = transport.send(frame)
    assert (answer.frame_crc, answer.count) == (read_header(frame).body_crc, 2)
    assert [(p.subject, p.first_sequence, p.count) for p in answer.places] == [(subject, 0, 2)]


def test_S9_every_byte_of_a_record_comes_back_as_it_was_sent(
    transport: Transport, subject: str
) -> None:
    records = [
        encode_record(
            Record(
                message_id=MESSAGE_IDS.next_id(),
                subject=subject,
                body=body,
                key="Schlüssel",
                tags=("late", "very-late"),
                headers=(("trace", "a\tb\x00c"), ("empty", "")),
                born_at_ms=1,
            )
        )
        for body in (b"", bytes(range(256)), b"\x00" * 10_000, b"x" * 1_000_000)
    ]
    transport.send(build_message_frame({subject: records}))
    got: list[bytes] = []
    while len(got) < len(records):
        got += [one.record for one in pull(transport, subject, wait_ms=WAIT_MS).messages]
    assert got == records


def test_messages_of_one_subject_come_in_the_order_of_their_sequences(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"0", b"1"))
    transport.send(frame_of(subject, b"2"))
    deliveries = pull(transport, subject, wait_ms=WAIT_MS)
    assert [one.sequence for one in deliveries.messages] == [0, 1, 2]
    assert bodies(deliveries) == [b"0", b"1", b"2"]


def test_a_repeated_send_is_accepted_and_stored_once(transport: Transport, subject: str) -> None:
    frame = frame_of(subject, b"a", b"b")
    transport.send(frame)
    assert transport.send(frame).duplicates == 2
    assert bodies(pull(transport, subject, wait_ms=WAIT_MS)) == [b"a", b"b"]


def test_an_id_with_other_bytes_is_refused_by_name_and_nothing_of_the_frame_is_stored(
    transport: Transport, subject: str
) -> None:
    message_id = MESSAGE_IDS.next_id()
    transport.send(build_message_frame({subject: [record_of(subject, b"first", message_id)]}))
    conflict = [record_of(subject, b"new"), record_of(subject, b"other", message_id)]
    with pytest.raises(BrokerRefusedError) as caught:
        transport.send(build_message_frame({subject: conflict}))
    assert caught.value.status == 409
    assert caught.value.answer.message_id == message_id.hex()
    assert bodies(pull(transport, subject)) == [b"first"]


def test_a_record_altered_after_it_was_made_is_refused(transport: Transport, subject: str) -> None:
    record = record_of(subject, b"abc")
    altered = record[:-1] + b"X"
    with pytest.raises(BrokerRefusedError):
        transport.send(build_message_frame({subject: [altered]}))
    assert pull(transport, subject).messages == ()


def test_C1_a_leased_message_is_given_to_nobody_else_of_its_group(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a", b"b", b"c"))
    first = pull(transport, subject, max_messages=2, wait_ms=WAIT_MS)
    second = pull(transport, subject, consumer="two", max_messages=2)
    assert bodies(first) + bodies(second) == [b"a", b"b", b"c"]
    assert pull(transport, subject, consumer="three").messages == ()


def test_C1_each_group_gets_every_message(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    for group in ("red", "blue"):
        assert bodies(pull(transport, subject, group=group, wait_ms=WAIT_MS)) == [b"a"]


def test_C1_an_acked_message_never_comes_again(transport: Transport, subject: str) -> None:
    def ask(subject: str, lease_ms: int) -> SettleAnswer:
        transport.send(frame_of(subject, b"a"))
        got = pull(transport, subject, lease_ms=lease_ms, wait_ms=WAIT_MS)
        return settle(transport, subject, acks(got))

    used, lease_ms, answer = within_a_lease(subject, ask)
    assert answer.settled == 1
    assert pull(transport, used, wait_ms=3 * lease_ms).messages == ()


def test_F30_C3_a_silent_consumer_loses_its_message_and_its_late_ack_is_stale(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a"))
    first = pull(transport, subject, lease_ms=SHORT_LEASE_MS, wait_ms=WAIT_MS)
    second = pull(transport, subject, consumer="two", wait_ms=WAIT_MS)
    assert bodies(second) == [b"a"]
    answer = settle(transport, subject, acks(first))
    assert answer.settled == 0
    assert answer.stale == ((first.head.token, *span(first)),)
    assert settle(transport, subject, acks(second), consumer="two").settled == 1


def test_C3_an_extended_lease_holds(transport: Transport, subject: str) -> None:
    def ask(subject: str, lease_ms: int) -> tuple[Deliveries, SettleAnswer]:
        transport.send(frame_of(subject, b"a"))
        got = pull(transport, subject, lease_ms=lease_ms, wait_ms=WAIT_MS)
        longer = Settlement(
            token=got.head.token, extends=(Extend(range=span(got), lease_ms=LONG_LEASE_MS),)
        )
        return got, settle(transport, subject, longer)

    used, lease_ms, (got, answer) = within_a_lease(subject, ask)
    assert answer.stale == ()
    assert pull(transport, used, consumer="two", wait_ms=2 * lease_ms).messages == ()
    assert settle(transport, used, acks(got)).settled == 1


def test_C4_attempts_are_counted_at_hand_out(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    for attempt in (1, 2, 3):
        got = pull(transport, subject, wait_ms=WAIT_MS)
        assert [one.attempt for one in got.messages] == [attempt]
        settle(transport, subject, nacks(got, delay_ms=0))


def test_C4_after_the_last_attempt_the_message_comes_no_more(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"poison", b"good"))
    for _ in range(2):
        got = pull(transport, subject, max_messages=1, max_attempts=2, wait_ms=WAIT_MS)
        assert bodies(got) == [b"poison"]
        settle(transport, subject, nacks(got, delay_ms=0))
    assert bodies(pull(transport, subject, max_attempts=2, wait_ms=WAIT_MS)) == [b"good"]


def test_C4_a_message_whose_consumers_only_fall_silent_uses_up_its_attempts(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"poison"))
    got = pull(transport, subject, max_attempts=1, lease_ms=SHORT_LEASE_MS, wait_ms=WAIT_MS)
    assert bodies(got) == [b"poison"]
    assert pull(transport, subject, max_attempts=1, wait_ms=4 * SHORT_LEASE_MS).messages == ()
    assert settle(transport, subject, acks(got)).stale != ()


def test_C4_a_message_that_may_have_ended_its_consumers_comes_alone(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a", b"b"))
    for crashed in ("first", "second"):
        held = pull(
            transport,
            subject,
            consumer=crashed,
            lease_ms=SHORT_LEASE_MS,
            backoff=Backoff(first_ms=1, factor=1.0, max_ms=1),
            wait_ms=WAIT_MS,
        )
        assert bodies(held) == [b"a", b"b"]
    alone = pull(transport, subject, wait_ms=WAIT_MS)
    assert (bodies(alone), alone.messages[0].attempt) == ([b"a"], 3)
    assert pull(transport, subject).messages == (), "nothing beside it, until a word is said"
    settle(transport, subject, acks(alone))
    assert bodies(pull(transport, subject)) == [b"b"]


def test_a_rejected_message_comes_no_more(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    got = pull(transport, subject, wait_ms=WAIT_MS)
    reject = Settlement(
        token=got.head.token, rejects=(Reject(range=span(got), reason="not for us"),)
    )
    assert settle(transport, subject, reject).settled == 1
    assert pull(transport, subject, wait_ms=SHORT_LEASE_MS).messages == ()


def test_a_nack_with_a_delay_holds_the_message_back(transport: Transport, subject: str) -> None:
    def ask(subject: str, delay_ms: int) -> Deliveries:
        transport.send(frame_of(subject, b"a"))
        got = pull(transport, subject, wait_ms=WAIT_MS)
        settle(transport, subject, nacks(got, delay_ms=delay_ms))
        return pull(transport, subject)

    used, delay_ms, meanwhile = within_a_lease(subject, ask)
    assert meanwhile.messages == ()
    again = pull(transport, used, wait_ms=delay_ms + WAIT_MS)
    assert [(one.sequence, one.attempt) for one in again.messages] == [(0, 2)]


@pytest.mark.parametrize("delay_ms", [0, None])
def test_C4_a_message_that_no_handler_began_with_comes_again_after_its_last_attempt(
    transport: Transport, subject: str, delay_ms: int | None
) -> None:
    transport.send(frame_of(subject, b"a"))
    backoff = Backoff(first_ms=1, max_ms=1)
    got = pull(transport, subject, wait_ms=WAIT_MS, max_attempts=1, backoff=backoff)
    unbegun = Nack(range=span(got), delay_ms=delay_ms, error="stopped", was_begun=False)
    settle(transport, subject, Settlement(token=got.head.token, nacks=(unbegun,)))
    again = pull(transport, subject, wait_ms=WAIT_MS, max_attempts=1)
    assert [(one.sequence, one.attempt) for one in again.messages] == [(0, 1)]
    settle(transport, subject, nacks(again, delay_ms=0))
    assert pull(transport, subject, max_attempts=1).messages == ()


def test_C6_a_message_that_fails_holds_up_no_other(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"bad", b"good"))
    got = pull(transport, subject, max_messages=1, wait_ms=WAIT_MS)
    settle(transport, subject, nacks(got, delay_ms=LONG_LEASE_MS))
    assert bodies(pull(transport, subject)) == [b"good"]


def test_outcomes_come_in_any_order_and_as_ranges(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, *[b"%d" % i for i in range(6)]))
    got = pull(transport, subject, wait_ms=WAIT_MS)
    first = span(got)[0]
    settlement = Settlement(
        token=got.head.token,
        acks=((first + 4, first + 6), (first, first + 1)),
        nacks=(Nack(range=(first + 2, first + 4), delay_ms=0),),
    )
    assert settle(transport, subject, settlement).settled == 5
    again = pull(transport, subject, wait_ms=WAIT_MS)
    assert bodies(again) == [b"2", b"3"]
    rest = Settlement(token=got.head.token, acks=((first + 1, first + 2),))
    assert settle(transport, subject, rest).settled == 1


def test_a_pull_carries_settlements_and_reports_the_stale_ones(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a", b"b"))
    got = pull(transport, subject, max_messages=1, wait_ms=WAIT_MS)
    token, (first, after) = got.head.token, span(got)
    mixed = Settlement(token=token, acks=((first, after), (after + 50, after + 52)))
    more = pull(transport, subject, settlements=[mixed])
    assert bodies(more) == [b"b"]
    assert more.head.stale == ((token, after + 50, after + 52),)


def test_F30_an_ack_repeated_after_a_lost_answer_is_not_stale(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"a"))
    got = pull(transport, subject, wait_ms=WAIT_MS)
    settle(transport, subject, acks(got))
    assert settle(transport, subject, acks(got)).stale == ()


def test_F30_an_outcome_under_another_token_is_stale(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    got = pull(transport, subject, wait_ms=WAIT_MS)
    wrong = Settlement(token=got.head.token + 1, acks=(span(got),))
    assert settle(transport, subject, wrong).settled == 0
    assert settle(transport, subject, acks(got)).settled == 1


def test_an_outcome_of_another_consumer_is_stale(transport: Transport, subject: str) -> None:
    transport.send(frame_of(subject, b"a"))
    got = pull(transport, subject, wait_ms=WAIT_MS)
    assert settle(transport, subject, acks(got), consumer="thief").settled == 0


def test_an_outcome_for_a_group_nobody_knows_is_stale(transport: Transport, subject: str) -> None:
    unknown = Settlement(token=1, acks=((0, 2),))
    assert settle(transport, subject, unknown, group="nobody").stale == ((1, 0, 2),)


def test_a_group_that_starts_latest_sees_only_what_comes_later(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"old"))
    assert bodies(pull(transport, subject, group="other", wait_ms=WAIT_MS)) == [b"old"]
    assert pull(transport, subject, start="latest").messages == ()
    transport.send(frame_of(subject, b"new"))
    assert bodies(pull(transport, subject, start="latest", wait_ms=WAIT_MS)) == [b"new"]


def test_a_waiting_pull_is_woken_by_a_send(transport: Transport, subject: str) -> None:
    got: list[bytes] = []
    waiting = threading.Thread(
        target=lambda: got.extend(bodies(pull(transport, subject, wait_ms=WAIT_MS)))
    )
    waiting.start()
    transport.send(frame_of(subject, b"news"))
    waiting.join(WAIT_MS / 1000)
    assert got == [b"news"]


def test_a_pull_from_a_subject_nobody_sent_to_is_empty(transport: Transport, subject: str) -> None:
    deliveries = pull(transport, subject)
    assert (deliveries.head.subject, deliveries.messages) == (subject, ())


def test_a_pull_is_bounded_by_bytes_but_gives_at_least_one(
    transport: Transport, subject: str
) -> None:
    transport.send(frame_of(subject, b"x" * 5_000, b"y" * 5_000))
    request = PullRequest(
        subject=subject, group="group", consumer="one", max_bytes=100, wait_ms=WAIT_MS
    )
    assert [len(body) for body in bodies(transport.pull(request))] == [5_000]


@pytest.mark.parametrize(
    "wrong",
    [
        PullRequest(subject="a b", group="g", consumer="c"),
        PullRequest(subject="a", group="", consumer="c"),
        PullRequest(subject="a", group="g", consumer="../c"),
        PullRequest(subject="a", group="g", consumer="c", max_messages=0),
        PullRequest(subject="a", group="g", consumer="c", lease_ms=0),
        PullRequest(subject="a", group="g", consumer="c", max_attempts=0),
        PullRequest(subject="a", group="g", consumer="c", start="middle"),
        PullRequest(subject="a", group="g", consumer="c", start="sequence:-1"),
        PullRequest(subject="a", group="g", consumer="c", start="time:now"),
        PullRequest(subject="a", group="g", consumer="c", tags=Tags(any=("a b",))),
    ],
)
def test_a_pull_that_cannot_be_meant_is_refused(transport: Transport, wrong: PullRequest) -> None:
    with pytest.raises(BrokerRefusedError) as caught:
        transport.pull(wrong)
    assert caught.value.status == 422


def test_bytes_that_are_no_frame_are_refused(transport: Transport, subject: str) -> None:
    frame = bytearray(frame_of(subject, b"abc"))
    frame[-9] ^= 0xFF
    with pytest.raises(BrokerRefusedError) as caught:
        transport.send(bytes(frame))
    assert caught.value.status == 400


def test_a_closed_transport_says_so_and_may_be_closed_again(
    transport: Transport, subject: str
) -> None:
    transport.close()
    transport.close()
    with pytest.raises(TransportError):
        pull(transport, subject)
