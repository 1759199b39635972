"""What the routes about delayed messages cost, and whom a look through the schedule holds up."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.face.routes.delayed import LOOKS_MAX
from qmq_broker.service.delay import query
from qmq_broker.storage.schedule.states import DelayedState
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.face.asgi import Client
from tests.broker.face.delayed import cancel, ids_of

DEADLINE_S = 60


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DelayRig]:
    """Two messages, due in one and in two hours; few ids are remembered."""
    made = DelayRig(tmp_path, dedupe_ids=1)
    made.send_delayed({b"one": made.now_ms + HOUR_MS, b"two": made.now_ms + 2 * HOUR_MS})
    yield made
    made.close()


def test_B10_many_messages_are_looked_for_in_one_pass(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, buckets = rig.store.schedule, []
    columns = schedule.columns

    def counted(bucket: int, *given: Any, **more: Any) -> Any:
        buckets.append(bucket)
        return columns(bucket, *given, **more)

    monkeypatch.setattr(schedule, "columns", counted)
    first, second = rig.find_all()
    strangers = [number.to_bytes(16) for number in range(90)]
    # Bytes of two ids, one behind the other, are no id.
    strangers.append((first.message_id + second.message_id)[8:24])
    buckets.clear()
    ids = [first.message_id, *strangers, second.message_id]
    outcomes = cancel(Client(rig), *(one.hex() for one in ids))
    assert outcomes == ["cancelled", *["unknown"] * len(strangers), "cancelled"]
    assert len(buckets) == len(set(buckets))


def test_F38_looks_through_the_schedule_do_not_hold_up_a_stop(rig: DelayRig) -> None:
    client, name = Client(rig), ids_of(rig)[0]
    rig.broker.delayed.releaser.stop()
    replies = [
        client.get("/v1/delayed"),
        client.get("/v1/delayed/histogram"),
        client.get(f"/v1/delayed/{name}"),
        client.post("/v1/delayed/cancel", {"message_ids": [name]}),
    ]
    assert [(reply.status, reply.json["code"]) for reply in replies] == [(503, "unavailable")] * 4


def test_B10_a_look_lists_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has hundreds of names, and there may be thousands of files to be looked into."""
    rig = DelayRig(tmp_path)
    rig.send_delayed({b"one": rig.now_ms + HOUR_MS, b"two": rig.now_ms + 2 * HOUR_MS})
    rig.restart()
    assert len(list(tmp_path.glob("schedule/*/*"))) == 2
    listed: list[str] = []
    monkeypatch.setattr(rig.store.disk, "names", listed.append)
    assert cancel(Client(rig), *ids_of(rig)) == ["cancelled", "cancelled"]
    assert listed == []
    monkeypatch.undo()
    rig.close()


def test_D4_who_has_taken_something_back_is_not_refused_because_others_look(
    rig: DelayRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal says that nothing was carried out."""
    client, (message, _), (first, second) = Client(rig), rig.find_all(), ids_of(rig)
    delayed = rig.broker.delayed
    cancelling, may_look, looking = asyncio.Event(), threading.Event(), list[int]()
    cancel_places = delayed.changes.cancel

    def noted(*given: Any) -> None:
        cancel_places(*given)
        cancelling.set()

    def slow(*_: object) -> list[query.DelayedStatus]:
        looking.append(1)
        assert may_look.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(delayed.changes, "cancel", noted)
    monkeypatch.setattr(delayed.query, "listed", slow)

    async def run() -> Any:
        client.is_writing = False
        body = json.dumps({"message_ids": [first, bytes(16).hex()]}).encode()
        asked = asyncio.ensure_future(client.call("POST", "/v1/delayed/cancel", body))
        await cancelling.wait()
        others = [
            asyncio.ensure_future(client.call("GET", "/v1/delayed")) for _ in range(LOOKS_MAX)
        ]
        while len(looking) < LOOKS_MAX:
            await asyncio.sleep(0)
        client.is_writing = True
        while delayed.query.state(message) is DelayedState.PENDING:
            await asyncio.sleep(0)
        may_look.set()
        assert [(await one).status for one in others] == [200] * LOOKS_MAX
        return (await asked).json["outcomes"]

    assert asyncio.run(asyncio.wait_for(run(), DEADLINE_S)) == ["cancelled", "unknown"]
    monkeypatch.undo()
    assert ids_of(rig) == [second]
