"""What changes for callers while the broker runs: waiting pulls of revoked tokens, and SIGHUP."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

from qmq_broker.face.authentication.token_file import change_tokens
from qmq_broker.face.authentication.tokens import TokenList
from tests.broker.face.asgi import Reply, error_of
from tests.broker.face.guard import add_token, run_token
from tests.broker.face.guarded import Guarded
from tests.broker.service.rig import Rig
from tests.kit.broker_process import BrokerProcess

PULL = {"subject": "orders.eu", "group": "g", "consumer": "c", "wait_ms": 50_000}


async def waiting_pull(guarded: Guarded, then: object) -> Reply:
    """The answer to a pull, when `then` was done while it waited."""
    token = guarded.tokens["consumer"].encode()
    asked = asyncio.ensure_future(
        guarded.client.call(
            "POST",
            "/v1/pull",
            json.dumps(PULL).encode(),
            headers=[(b"authorization", b"Bearer " + token)],
        )
    )
    while not guarded.client.rig.broker.delivery.waiting.count:
        await asyncio.sleep(0)
    assert callable(then)
    then()
    return await asked


def test_B10_a_pull_that_waits_ends_when_its_token_is_revoked(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    guarded = Guarded(rig, path)

    def revoke() -> None:
        change_tokens(str(path), lambda _: TokenList())
        guarded.authenticator.step()

    reply = asyncio.run(waiting_pull(guarded, revoke))
    assert (reply.status, error_of(reply).code) == (401, "unauthenticated")
    assert rig.broker.delivery.waiting.count == 0


def test_B10_a_message_that_comes_goes_to_nobody_whose_token_was_revoked(
    rig: Rig, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.json"
    guarded = Guarded(rig, path)

    def revoke_and_send() -> None:
        change_tokens(str(path), lambda _: TokenList())
        guarded.authenticator.step()
        rig.send(b"secret", subject="orders.eu")

    assert asyncio.run(waiting_pull(guarded, revoke_and_send)).status == 401
    group = rig.broker.delivery.group("orders.eu", "g")
    assert group is not None
    assert group.cursor == 0


def test_a_pull_that_waits_continues_when_other_tokens_change(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    guarded = Guarded(rig, path)

    def remove_another_and_send() -> None:
        change_tokens(
            str(path),
            lambda known: TokenList(
                tokens=tuple(one for one in known.tokens if one.name != "producer")
            ),
        )
        guarded.authenticator.step()
        rig.send(b"a", subject="orders.eu")

    reply = asyncio.run(waiting_pull(guarded, remove_another_and_send))
    assert reply.status == 200
    assert len(reply.json["messages"]) == 1


def test_SIGHUP_reads_the_tokens_again_and_ends_nothing(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    token_id, _ = add_token(tokens, "producer")
    with BrokerProcess(tmp_path / "data", "--tokens", str(tokens)) as broker:
        broker.send_signal(signal.SIGHUP)
        broker.wait_for(" reloading signal=SIGHUP")
        broker.wait_for(" tokens_read tokens=1")
        run_token("revoke", token_id, "--tokens", str(tokens))
        broker.send_signal(signal.SIGHUP)
        broker.wait_for(" tokens_read tokens=0")
        assert broker.stop() == 0
