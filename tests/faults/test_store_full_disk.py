"""F27: a disk that is full, for real: producers are refused, the rest goes on, and it heals by itself.

A quota is a full disk of which the free space says nothing, so no reserve can be kept: whatever needs room
is refused until there is some.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.errors import BrokerBusyError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from tests.contract.asking import acks, pull, settle
from tests.faults.store_disk import KINDS, fill, small_disk
from tests.faults.store_fuse import mounted, set_quota, used_bytes
from tests.faults.store_life import SUBJECTS, Sent, StoreProcess, check_survivors, frame_of
from tests.kit.waiting import DEADLINE_S, wait_for

#: Below it the broker takes no room for messages; pulls and acknowledgements may have it.
RESERVE_BYTES = 400_000
FRAMES = 20
#: Frames of a segment may still fit what was taken before the disk was full.
REFUSED_WITHIN = 60
GROUPS_REFUSED_WITHIN = 100


def _send(transport: HttpTransport, sent: Sent, ids: MessageIds, count: int) -> int:
    """Returns how many were accepted; whatever else happens must be a refusal for want of room."""
    accepted = sum(sent.send(transport, frame_of(ids, 900)) for _ in range(count))
    for error in sent.errors:
        assert isinstance(error, BrokerBusyError)
        assert "507" in str(error)
    return accepted


def _consume(transport: HttpTransport, group: str = "group") -> int:
    """Pull and acknowledge whatever there is; returns how many messages."""
    count = 0
    for subject in SUBJECTS:
        while (given := pull(transport, subject, group=group)).messages:
            answer = settle(transport, subject, acks(given), group=group)
            assert answer.settled == len(given.messages)
            count += len(given.messages)
    return count


def _consume_by_many(transport: HttpTransport) -> None:
    """So many groups that what they write fits nowhere that a frame was too large for."""
    for number in range(GROUPS_REFUSED_WITHIN):
        _consume(transport, f"group-{number}")


@pytest.mark.parametrize("reserve_bytes", [RESERVE_BYTES, 0], ids=["reserve", "no reserve"])
@pytest.mark.parametrize("kind", KINDS)
def test_B6_on_a_full_disk_sends_are_refused_and_all_else_continues_until_there_is_room(
    kind: str, reserve_bytes: int, tmp_path: Path
) -> None:
    sent, ids = Sent(), MessageIds(5)
    with small_disk(kind, tmp_path) as place:
        options = ("--keep-all", "--reserve-bytes", str(reserve_bytes))
        with StoreProcess(place / "data", *options) as broker:
            transport = HttpTransport(broker.url)
            assert _send(transport, sent, ids, FRAMES) == FRAMES
            ballast = fill(place, free_bytes=reserve_bytes // 2)
            accepted = _send(transport, sent, ids, REFUSED_WITHIN)
            assert accepted < REFUSED_WITHIN
            if reserve_bytes:
                assert _consume(transport) == len(SUBJECTS) * (FRAMES + accepted)
            ballast.unlink(missing_ok=True)
            # No restart, nothing said to the broker: there is room, so it goes on.
            assert _send(transport, sent, ids, FRAMES) == FRAMES
            rest = FRAMES if reserve_bytes else 2 * FRAMES + accepted
            assert _consume(transport) == len(SUBJECTS) * rest
            transport.close()
            assert broker.stop() == ExitCode.OK, broker.log
        assert "Traceback" not in broker.log
        check_survivors(place / "data", sent)


@pytest.mark.parametrize("kind", KINDS)
def test_B6_a_stop_on_a_full_disk_is_a_stop_without_its_mark_and_loses_nothing(
    kind: str, tmp_path: Path
) -> None:
    sent, ids = Sent(), MessageIds(5)
    with small_disk(kind, tmp_path) as place:
        with StoreProcess(place / "data", "--keep-all") as broker:
            transport = HttpTransport(broker.url)
            assert _send(transport, sent, ids, FRAMES) == FRAMES
            ballast = fill(place, free_bytes=0)
            transport.close()
            assert broker.stop() in (ExitCode.OK, ExitCode.UNCLEAN), broker.log
        assert "Traceback" not in broker.log
        assert " not_closed " not in broker.log
        ballast.unlink(missing_ok=True)
        check_survivors(place / "data", sent)


@pytest.mark.parametrize("more_bytes", [0, 3_000], ids=["nothing left", "little left"])
def test_B6_a_quota_that_is_used_up_refuses_by_name_loses_nothing_and_heals_when_it_is_raised(
    more_bytes: int, tmp_path: Path
) -> None:
    sent, ids = Sent(), MessageIds(5)
    with mounted(tmp_path / "disk") as place:
        data = place / "data"
        with StoreProcess(data, "--keep-all", "--reserve-bytes", str(RESERVE_BYTES)) as broker:
            transport = HttpTransport(broker.url)
            assert _send(transport, sent, ids, FRAMES) == FRAMES
            set_quota(place, used_bytes(place) + more_bytes)
            accepted = _send(transport, sent, ids, REFUSED_WITHIN)
            assert accepted < REFUSED_WITHIN
            assert "Disk quota exceeded" in str(sent.errors[-1])
            with pytest.raises(BrokerBusyError, match="507"):
                _consume_by_many(transport)
            broker.kill()
            broker.start()  # which needs no room that it has not
            set_quota(place)
            assert _send(transport, sent, ids, FRAMES) == FRAMES
            stored = len(SUBJECTS) * (2 * FRAMES + accepted)
            assert _consume(transport, "later") == stored
            transport.close()
            assert broker.stop() == ExitCode.OK, broker.log
        assert "Traceback" not in broker.log
        check_survivors(data, sent)


@contextmanager
def _nothing_left(kind: str, folder: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    """A disk, and what takes all the room that is left on it."""
    if kind == "quota":
        with mounted(folder / "disk") as place:
            yield place, lambda: set_quota(place, used_bytes(place))
    else:
        with small_disk(kind, folder) as place:
            yield place, lambda: fill(place, free_bytes=0)


@pytest.mark.parametrize("kind", [*KINDS, "quota"])
def test_B6_B12_where_nothing_is_left_a_keeper_can_be_removed_and_what_waited_for_it_makes_room(
    kind: str, tmp_path: Path
) -> None:
    sent, ids = Sent(), MessageIds(5)
    with _nothing_left(kind, tmp_path) as (place, take_all):
        with StoreProcess(place / "data") as broker:
            transport = HttpTransport(broker.url)
            store_id = json.loads((place / "data/FORMAT").read_bytes().splitlines()[0])["store_id"]
            told = {"name": "archive", "store_id": store_id}
            told |= {"kept_offset": 0, "kept_actions_offset": 0}
            assert (
                httpx.post(
                    f"{broker.url}/v1/keepers/keep", json=told, timeout=DEADLINE_S
                ).status_code
                == 200
            )
            while not _held_bytes(broker):
                assert _send(transport, sent, ids, FRAMES) == FRAMES
            take_all()
            assert _send(transport, sent, ids, REFUSED_WITHIN) < REFUSED_WITHIN
            removed = httpx.post(
                f"{broker.url}/v1/keepers/remove", json={"name": "archive"}, timeout=DEADLINE_S
            )
            assert removed.status_code == 200, removed.text
            # No room was made by anybody else.
            wait_for(lambda: _send(transport, sent, ids, 1) == 1, lambda: broker.log)
            transport.close()
            broker.stop()
        assert "Traceback" not in broker.log


def _held_bytes(broker: StoreProcess) -> int:
    """What only a keeper holds back."""
    listed = httpx.get(f"{broker.url}/v1/keepers", timeout=DEADLINE_S).json()["keepers"]
    return sum(int(one["held_bytes"]) for one in listed)
