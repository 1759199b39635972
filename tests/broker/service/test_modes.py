"""Expiry, at most once, broadcast, pause, seek and waits of a group: over restarts as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.errors import NotFoundError
from qmq_broker.service.limits import ServiceLimits
from qmq_client.group.actions import Dead
from qmq_client.group.dead_letters import EXPIRED
from qmq_client.wire.errors import InvalidMessageError, TooLargeError
from qmq_client.wire.operations import ConfigureRequest
from qmq_client.wire.requests import Backoff, Tags
from qmq_client.wire.start import parse_start
from tests.broker.service.rig import GROUP, STORE, SUBJECT, Rig


def seek(rig: Rig, to: str, group: str = GROUP) -> int:
    return rig.broker.changes.seek(SUBJECT, group, parse_start(to), rig.now_ms)


def test_an_expired_message_is_a_dead_letter_and_counted(rig: Rig) -> None:
    rig.send(b"a", expires_at_ms=rig.now_ms)
    rig.send(b"b", expires_at_ms=rig.now_ms + 1)
    rig.send(b"c")
    assert rig.pull().bodies == [b"b", b"c"]
    rig.restart()
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert (letter.sequence, letter.reason, letter.attempts) == (0, "expired", 0)
    (status,) = rig.broker.query.groups()
    assert (status.expired, status.dead, status.in_flight) == (1, 1, 2)


def test_an_expiry_that_a_crash_cut_off_from_its_hand_out_is_counted_once(rig: Rig) -> None:
    rig.pull()
    rig.send(b"a", expires_at_ms=rig.now_ms)
    rig.store.actions.append(
        [Dead(rig.now_ms, SUBJECT, GROUP, sequence=0, attempts=0, reason=EXPIRED, error="")]
    )
    rig.restart()
    assert rig.pull().bodies == []
    (status,) = rig.broker.query.groups()
    assert (status.expired, status.dead, status.cursor) == (1, 1, 1)


def test_a_message_that_expires_while_it_waits_keeps_its_history(rig: Rig) -> None:
    rig.send(b"a", expires_at_ms=rig.now_ms + 5_000)
    rig.settle(rig.pull().nack(delay_ms=5_000, error="TimeoutError"))
    rig.pass_ms(5_000)
    assert rig.pull().bodies == []
    (letter,) = rig.broker.query.dead_letters(SUBJECT, GROUP)
    assert (letter.reason, letter.attempts) == ("expired", 1)
    assert [attempt.error for attempt in letter.history] == ["TimeoutError"]
    (status,) = rig.broker.query.groups()
    assert (status.redelivery, status.expired) == (0, 1)


def test_nothing_but_expired_messages_leaves_the_group_at_the_end(rig: Rig) -> None:
    rig.send(*[b"x"] * 300, expires_at_ms=1)
    assert rig.pull(max_messages=10).bodies == []
    while rig.broker.delivery.step(rig.now_ms).is_unfinished:
        rig.pull(max_messages=10)
    for _ in range(4):
        rig.pull(max_messages=10)
    (status,) = rig.broker.query.groups()
    assert (status.cursor, status.expired, status.lag) == (300, 300, 0)


def test_at_most_once_is_acked_in_the_same_frame_as_the_hand_out(rig: Rig) -> None:
    rig.send(b"a", b"b", b"c")
    given = rig.pull(at_most_once=True, max_messages=2, lease_ms=1_000)
    assert given.bodies == [b"a", b"b"]
    rig.restart()
    rig.pass_ms(60_000)
    assert rig.pull(at_most_once=True).bodies == [b"c"]
    (status,) = rig.broker.query.groups()
    assert (status.acked, status.in_flight, status.redelivery) == (3, 0, 0)


def test_C10_each_consumer_of_a_broadcast_continues_where_it_was(rig: Rig) -> None:
    rig.send(b"a", b"b")
    for consumer in ("one", "two"):
        given = rig.pull(consumer, broadcast="named", max_messages=1)
        assert given.bodies == [b"a"]
        assert rig.settle(given.ack(), consumer, broadcast="named").settled == 1
    rig.restart()
    assert rig.pull("two", broadcast="named").bodies == [b"b"]
    assert {one.group for one in rig.broker.query.groups()} == {f"{GROUP}@one", f"{GROUP}@two"}


def test_C10_a_broadcasts_consumer_that_is_gone_is_forgotten_and_holds_nothing_back(
    tmp_path: Path,
) -> None:
    limits = ServiceLimits(ephemeral_idle_ms=10_000, named_idle_ms=60_000)
    rig = Rig(tmp_path / "data", limits=limits)
    rig.send(b"a")
    rig.pull("gone", broadcast="ephemeral")
    rig.pull("lives", broadcast="ephemeral")
    rig.pull("again", broadcast="named")
    rig.pull("member")
    rig.pass_ms(9_000)
    rig.pull("lives", broadcast="ephemeral")
    rig.pass_ms(1_000)
    assert rig.broker.delivery.registry.end_idle(rig.now_ms) == 1
    names = {one.group for one in rig.broker.query.groups()}
    assert names == {GROUP, f"{GROUP}@lives", f"{GROUP}@again"}
    rig.restart()
    assert {one.group for one in rig.broker.query.groups()} == names
    rig.pass_ms(60_000)
    assert rig.broker.delivery.registry.end_idle(rig.now_ms) == 2
    assert {one.group for one in rig.broker.query.groups()} == {GROUP}
    rig.close()


def test_C10_a_broadcasts_consumer_that_was_removed_does_not_end_once_more(rig: Rig) -> None:
    rig.pull("one", broadcast="ephemeral")
    rig.broker.changes.remove(SUBJECT, f"{GROUP}@one", rig.now_ms)
    later_ms = rig.now_ms + ServiceLimits().named_idle_ms
    assert rig.broker.delivery.registry.end_idle(later_ms) == 0


def test_C10_a_consumer_may_become_one_that_is_kept_for_days(rig: Rig) -> None:
    rig.pull("one", broadcast="ephemeral")
    rig.pull("one", broadcast="named")
    rig.restart()
    (status,) = rig.broker.query.groups()
    assert status.idle_ms == ServiceLimits().named_idle_ms


def test_C10_after_a_restart_consumers_get_time_to_come_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data", limits=ServiceLimits(ephemeral_idle_ms=10_000))
    rig.pull("one", broadcast="ephemeral")
    rig.pass_ms(9_000)
    rig.pull("one", broadcast="ephemeral")
    rig.close()
    rig.clock.pass_ms(3_600_000)
    rig.start()
    assert rig.broker.delivery.registry.end_idle(rig.now_ms) == 0
    rig.pass_ms(10_000)
    assert rig.broker.delivery.registry.end_idle(rig.now_ms) == 1
    rig.close()


DAY_MS = 24 * 3_600_000


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
def test_C10_a_named_consumer_that_got_nothing_is_kept_for_seven_days_over_restarts(
    tmp_path: Path, is_new: bool
) -> None:
    """It asked until a moment before the broker was killed, and is away for six days."""
    rig = Rig(tmp_path / "data")
    for _ in range(1 if is_new else 20):
        assert rig.pull("one", broadcast="named", start="latest").bodies == []
        rig.pass_ms(DAY_MS // 2)
    rig.restart()
    rig.pass_ms(6 * DAY_MS)
    assert rig.broker.delivery.registry.end_idle(rig.now_ms) == 0
    rig.send(b"while it was away")
    rig.restart()
    assert rig.pull("one", broadcast="named", start="latest").bodies == [b"while it was away"]
    rig.close()


def test_C10_a_named_consumer_that_is_gone_is_forgotten_over_restarts(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    rig.pull("gone", broadcast="named")
    for _ in range(9):
        rig.pass_ms(DAY_MS)
        rig.restart()
        rig.broker.delivery.registry.end_idle(rig.now_ms)
    rig.pass_ms(DAY_MS // 2)
    rig.broker.delivery.registry.end_idle(rig.now_ms)
    assert rig.broker.query.groups() == []
    rig.close()


def test_C10_that_a_consumer_is_there_is_noted_once_a_day(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    rig.pull("one", broadcast="named")
    before = rig.store.actions.log.written_offset
    for _ in range(100):
        rig.pass_ms(DAY_MS // 200)
        rig.pull("one", broadcast="named")
    assert rig.store.actions.log.written_offset == before
    rig.pass_ms(DAY_MS)
    rig.pull("one", broadcast="named")
    assert rig.store.actions.log.written_offset > before
    rig.close()


def test_a_paused_group_gets_nothing_and_settles_what_it_has(rig: Rig) -> None:
    rig.send(b"a", b"b")
    given = rig.pull(max_messages=1)
    assert rig.broker.changes.pause(SUBJECT, GROUP, rig.now_ms, is_paused=True)
    assert not rig.broker.changes.pause(SUBJECT, GROUP, rig.now_ms, is_paused=True)
    rig.restart()
    assert rig.pull("two").bodies == []
    assert rig.settle(given.nack(delay_ms=0)).settled == 1
    assert rig.pull("two").bodies == []
    woken: list[bool] = []
    rig.broker.delivery.waiting.add((SUBJECT, GROUP), lambda: woken.append(True))
    rig.broker.changes.pause(SUBJECT, GROUP, rig.now_ms, is_paused=False)
    assert woken == [True]
    rig.restart()
    assert rig.pull("two").bodies == [b"a", b"b"]


@pytest.mark.parametrize(
    ("to", "bodies"),
    [
        ("earliest", [b"a", b"b", b"c"]),
        ("latest", []),
        ("sequence:2", [b"c"]),
        ("sequence:77", []),
    ],
)
def test_seek_moves_a_group_for_good(rig: Rig, to: str, bodies: list[bytes]) -> None:
    rig.send(b"a", b"b", b"c")
    given = rig.pull()
    rig.settle(given.nack(delay_ms=0))
    held = rig.pull(max_messages=1)
    seek(rig, to)
    rig.restart()
    again = rig.pull("two")
    assert (again.bodies, set(again.attempts)) == (bodies, {1} if bodies else set())
    assert rig.settle(held.ack()).stale == ((held.token, held.first, held.next),)
    (status,) = rig.broker.query.groups()
    assert (status.redelivery, status.in_flight) == (0, len(bodies))


def test_seek_to_a_time_finds_what_was_stored_from_then_on(rig: Rig) -> None:
    rig.send(b"a")
    rig.pass_ms(1_000)
    at_ms = rig.now_ms
    rig.send(b"b")
    rig.pass_ms(1_000)
    rig.send(b"c")
    rig.settle(rig.pull().ack())
    assert seek(rig, f"time:{at_ms}") == 1
    assert rig.pull().bodies == [b"b", b"c"]
    assert seek(rig, f"time:{at_ms + 1}") == 2
    assert seek(rig, "time:0") == 0
    assert seek(rig, f"time:{rig.now_ms + 1_000_000}") == 3


def test_C12_seek_stays_between_what_is_there_and_the_durable_end(tmp_path: Path) -> None:
    options = replace(STORE, segment_bytes=8 * 1024, dedupe_ids=4, queue_flush_bytes=1)
    rig = Rig(tmp_path / "data", store_options=options)
    for _ in range(40):
        rig.send(b"x" * 1_000)
        rig.clock.pass_ms(2_000)
    rig.store.step()
    for _ in range(3):
        rig.clock.pass_ms(2_000)
        rig.store.step()
    rig.pull(start="latest")
    rig.store.give_up_below(rig.store.durable_offset)
    queue = rig.store.queue(SUBJECT)
    assert queue is not None
    assert queue.first_sequence > 0
    assert seek(rig, "earliest") == queue.first_sequence
    assert seek(rig, "sequence:0") == queue.first_sequence
    assert seek(rig, "sequence:999") == queue.next_sequence == 40
    rig.close()


def test_dead_letters_behind_a_seek_are_taken_back_because_their_messages_come_again(
    rig: Rig,
) -> None:
    rig.send(b"a", b"b", b"c")
    rig.settle(rig.pull().reject("no"))
    assert seek(rig, "sequence:1") == 1
    assert [one.sequence for one in rig.broker.query.dead_letters(SUBJECT, GROUP)] == [0]
    assert rig.pull().bodies == [b"b", b"c"]


def test_a_change_of_a_group_that_is_not_there_is_reported(rig: Rig) -> None:
    with pytest.raises(NotFoundError):
        seek(rig, "earliest", "nobody")


def test_the_waits_of_a_group_are_kept_with_it(rig: Rig) -> None:
    rig.send(b"a")
    slow = Backoff(first_ms=10_000, factor=3.0, max_ms=20_000)
    rig.settle(rig.pull(backoff=slow).nack())
    rig.restart()
    rig.pass_ms(9_999)
    assert rig.pull().bodies == []
    rig.pass_ms(1)
    rig.settle(rig.pull().nack())
    rig.pass_ms(19_999)
    assert rig.pull().bodies == [], "three times as long, but not over the bound"
    rig.pass_ms(1)
    assert rig.pull().attempts == [3]


def test_settings_are_changed_one_by_one(rig: Rig) -> None:
    rig.pull(tags=Tags(any=("red",)), backoff=Backoff(first_ms=5, max_ms=5), max_attempts=4)
    change = ConfigureRequest(subject=SUBJECT, group=GROUP, max_attempts=7)
    rig.broker.changes.configure(change, rig.now_ms)
    rig.restart()
    (status,) = rig.broker.query.groups()
    assert (status.max_attempts, status.tags) == (7, Tags(any=("red",)))
    assert status.backoff == Backoff(first_ms=5, max_ms=5)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"tags": Tags(any=("a b",))}, InvalidMessageError),
        ({"tags": Tags(all=tuple(f"t{n}" for n in range(65)))}, TooLargeError),
        ({"backoff": Backoff(first_ms=2, max_ms=1)}, InvalidMessageError),
        ({"backoff": Backoff(max_ms=10**10)}, InvalidMessageError),
        ({"max_attempts": 1_001}, InvalidMessageError),
    ],
    ids=["tag", "tags", "backoff", "long backoff", "attempts"],
)
def test_B10_settings_have_bounds(
    rig: Rig, settings: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        rig.pull(**settings)
    rig.pull()
    with pytest.raises(kind):
        rig.broker.changes.configure(
            ConfigureRequest(subject=SUBJECT, group=GROUP, **settings),
            rig.now_ms,
        )


def test_a_removed_group_is_gone_over_a_restart_and_made_again_by_a_pull(rig: Rig) -> None:
    rig.send(b"a")
    given = rig.pull()
    rig.broker.changes.remove(SUBJECT, GROUP, rig.now_ms)
    assert rig.settle(given.ack()).settled == 0
    rig.restart()
    assert rig.broker.query.groups() == []
    assert rig.pull().bodies == [b"a"]
    rig.restart()
    assert len(rig.broker.query.groups()) == 1


def test_lag_is_reported_in_messages_and_in_seconds(rig: Rig) -> None:
    rig.pull()
    assert rig.broker.query.groups()[0].lag_s is None
    rig.send(b"a", born_at_ms=rig.now_ms)
    rig.pass_ms(2_500)
    rig.send(b"b", born_at_ms=rig.now_ms)
    (status,) = rig.broker.query.groups(now_ms=rig.now_ms)
    assert (status.lag, status.lag_s) == (2, 2.5)
    rig.pull(max_messages=1)
    rig.pass_ms(1_000)
    (status,) = rig.broker.query.groups(now_ms=rig.now_ms)
    assert (status.lag, status.lag_s) == (1, 1.0)
    rig.pull()
    assert rig.broker.query.groups(now_ms=rig.now_ms)[0].lag_s is None
