"""Tokens of a running broker: made, rotated and revoked while it serves; none is ever logged."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from qmq_broker.face.authentication.token_file import read_tokens
from qmq_broker.face.authentication.tokens import Tokens
from qmq_broker.face.commands.token import token
from qmq_client.commands.root import root
from tests.broker.face.guard import Authority, add_token, run_token
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

SEND = {"messages": [{"subject": "orders.eu", "body": "a"}]}


def status(broker: BrokerProcess, text: str | None, path: str = "/v1/caller") -> int:
    headers = {} if text is None else {"authorization": f"Bearer {text}"}
    return httpx.get(broker.url + path, headers=headers, timeout=DEADLINE_S).status_code


def after(broker: BrokerProcess, event: str, change: Callable[[], object]) -> None:
    """Make the change, and wait until the broker has taken it."""
    change()
    broker.wait_for(event)


def test_B10_tokens_come_and_go_without_a_restart_and_two_are_valid_at_once(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    old_id, old = add_token(tokens, "producer:orders.*")
    with BrokerProcess(tmp_path / "data", "--tokens", str(tokens)) as broker:
        assert (status(broker, None), status(broker, "x"), status(broker, old)) == (401, 401, 200)
        new: list[str] = []
        after(broker, " tokens_read ", lambda: new.extend(add_token(tokens, "producer:orders.*")))
        assert (status(broker, old), status(broker, new[1])) == (200, 200)
        after(broker, " tokens_read ", lambda: run_token("revoke", old_id, "--tokens", str(tokens)))
        assert (status(broker, old), status(broker, new[1])) == (401, 200)
        after(broker, " tokens_not_read ", lambda: tokens.write_text("{"))
        assert (status(broker, old), status(broker, new[1])) == (401, 200)
        after(broker, " tokens_not_read ", tokens.unlink)
        assert (status(broker, None), status(broker, new[1])) == (401, 200)
        assert status(broker, None, "/healthz") == 200
        broker.wait_for("unauthenticated_requests requests=")
        with httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client:
            for _ in range(100):
                assert client.get("/v1/caller").status_code == 401
        assert broker.stop() == 0
        assert broker.log.count("unauthenticated_requests") < 10, "at doubling intervals"
        for secret in (old, new[1]):
            assert secret not in broker.log
            assert secret.rpartition("_")[2] not in broker.log


def test_a_connection_is_not_a_caller_each_request_is_asked_again(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    producer, consumer = add_token(tokens, "producer")[1], add_token(tokens, "consumer")[1]
    with (
        BrokerProcess(tmp_path / "data", "--tokens", str(tokens)) as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        seen = [
            client.post("/v1/send", json=SEND, headers=headers).status_code
            for headers in (
                {"authorization": f"Bearer {producer}"},
                {},
                {"authorization": f"bearer {producer}"},
                {"authorization": f"Bearer {consumer}"},
                {"authorization": f"Basic {producer}"},
                {"authorization": producer},
            )
        ]
        assert seen == [200, 401, 200, 403, 401, 401]


def test_an_operator_shows_the_token_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokens, authority = tmp_path / "tokens.json", Authority(tmp_path / "authority")
    producer, admin = add_token(tokens, "producer")[1], add_token(tokens, "admin")[1]
    options = ["--tokens", str(tokens), *authority.server_options()]

    def operate(*words: str) -> tuple[int, str]:
        outcome = CliRunner().invoke(root, ["broker", *words])
        return outcome.exit_code, outcome.output

    with BrokerProcess(tmp_path / "data", *options) as broker:
        section = f'[broker]\nurl = "{broker.url}"\ntoken_file = "token"\n'
        Path("qmq.toml").write_text(section)
        Path("token").write_text(admin)
        assert operate("status")[0] == 3, "nobody vouches for its certificate"
        Path("qmq.toml").write_text(section + f'ca_file = "{authority.file}"\n')
        assert operate("status")[1].startswith("serving\nbound ")
        assert operate("readonly", "on")[0] == 0
        assert operate("readonly", "off")[0] == 0
        for text, says in ((producer, "has no role admin"), ("qmq_nobody", "valid token")):
            Path("token").write_text(text)
            code, output = operate("readonly", "on")
            assert (code, says in output, text in output) == (2, True, False)
            assert operate("status")[1].startswith("serving\n"), (
                "who may not list keepers is told the rest"
            )
        Path("token").write_text("two words")
        assert operate("status")[0] == 2
        assert admin not in broker.log


@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_a_broker_does_not_start_with_tokens_that_it_cannot_read(tmp_path: Path, kind: str) -> None:
    tokens = tmp_path / "tokens.json"
    if kind == "damaged":
        tokens.write_text("{")
    broker = BrokerProcess(tmp_path / "data", "--tokens", str(tokens))
    assert broker.run_to_end() == 2
    assert "qmq broker token add" in broker.log
    assert not (tmp_path / "data").exists()


def run(*words: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(token, words)
    return outcome.exit_code, outcome.output


def test_the_secret_is_printed_once_and_nowhere_else(tmp_path: Path) -> None:
    tokens = tmp_path / "t.json"
    outcome = CliRunner().invoke(
        token,
        ["add", "shop", "--tokens", str(tokens), "--role", "producer:orders.*", "--role", "admin"],
    )
    text = outcome.stdout.strip()
    assert re.fullmatch(r"qmq_[0-9a-f]{16}_[0-9a-f]{64}", text)
    assert text not in outcome.stderr
    _, listed = run("list", "--tokens", str(tokens))
    assert "shop  producer:orders.* admin:*  token" in listed
    assert text[-64:] not in listed + tokens.read_text()
    (shown,) = json.loads(run("list", "--tokens", str(tokens), "--json")[1])["tokens"]
    assert shown["state"] == "valid"
    assert shown["roles"] == ["producer:orders.*", "admin:*"]


def test_a_token_is_written_into_a_new_file_that_nobody_else_reads(tmp_path: Path) -> None:
    path, out = tmp_path / "tokens.json", tmp_path / "shop.token"
    words = ["add", "shop", "--tokens", str(path), "--role", "producer", "--out", str(out)]
    before = os.umask(0)
    try:
        exit_code, said = run(*words)
    finally:
        os.umask(before)
    assert exit_code == 0, said
    text = out.read_text().strip()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert text not in said
    tokens = Tokens(read_tokens(str(path)).tokens)
    caller = tokens.find(text, 0)
    assert caller is not None
    assert caller.name.startswith("shop ")
    exit_code, said = run(*words)
    assert exit_code == 1
    assert str(out) in said
    assert out.read_text().strip() == text
    assert len(read_tokens(str(path)).tokens) == 1, "no token that nobody has"


def test_a_token_that_does_not_count_leaves_no_file_behind(tmp_path: Path) -> None:
    path, out = tmp_path / "tokens.json", tmp_path / "shop.token"
    path.write_text("{")
    words = ["add", "shop", "--tokens", str(path), "--role", "producer", "--out", str(out)]
    exit_code, said = run(*words)
    assert (exit_code, out.exists()) == (1, False)
    assert "Restore it from a copy" in said
    path.unlink()
    assert run(*words)[0] == 0


def test_a_token_that_cannot_be_written_leaves_half_a_file_to_nobody(tmp_path: Path) -> None:
    out = tmp_path / "shop.token"
    words = ["add", "shop", "--tokens", str(tmp_path / "tokens.json"), "--role", "producer"]
    command = [sys.executable, "-m", "qmq_client.cli", "broker", "token", *words, "--out", str(out)]
    limited = f"ulimit -f 0; exec {shlex.join(command)}"
    full = subprocess.run(limited, shell=True, capture_output=True, text=True)
    assert (full.returncode, out.exists()) == (1, False)
    assert f"{out}: File too large; give --out a writable file" in full.stderr


def test_a_token_may_end_by_itself(tmp_path: Path) -> None:
    tokens = str(tmp_path / "t.json")
    run_token("add", "guest", "--tokens", tokens, "--role", "consumer", "--days", "1")
    (shown,) = json.loads(run_token("list", "--tokens", tokens, "--json"))["tokens"]
    assert shown["ends_at"] > shown["made_at"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["add", "a", "--role", "root"], 2, "producer, consumer, admin"),
        (["add", "a", "--role", "producer:a*b"], 2, "beginning of subjects"),
        (["add", "a"], 2, "--role"),
        (["add", "a\nb", "--role", "admin"], 2, "63"),
        (["add", "a" * 64, "--role", "admin"], 2, "63"),
        (["add", "a", "--role", "admin", "--days", "0"], 2, "days"),
        (["list"], 1, "it does not exist. Create it with"),
        (["revoke", "0123456789abcdef"], 1, "no token with id"),
    ],
)
def test_a_wrong_call_says_what_is_right_and_makes_no_file(
    tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    tokens = tmp_path / "t.json"
    exit_code, output = run(*words, "--tokens", str(tokens))
    assert exit_code == code
    assert says in output
    assert not tokens.exists()


def test_a_certificate_is_listed_once(tmp_path: Path) -> None:
    words = ["add", "shop", "--tokens", str(tmp_path / "t.json"), "--role", "admin"]
    assert run(*words, "--certificate", "shop.example")[0] == 0
    assert run(*words, "--certificate", "shop.example")[0] == 1
    assert run(*words)[0] == 0
