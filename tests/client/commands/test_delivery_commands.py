"""`qmq send | tail | subjects | groups | lag | dead | message trace` against a broker of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.orm import Session

from qmq_client import (
    Delivery,
    Message,
    Producer,
    Reject,
    consumer,
    create_tables,
    pull,
)
from qmq_client.commands.root import root
from qmq_client.consumer import Consumers
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.kit.waiting import DEADLINE_S, wait_for


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> str:
    """A subject of the test's own."""
    return str(request.node.name).split("[")[0][-100:]


def qmq(broker: BrokerProcess, *arguments: str, given: bytes | None = None) -> Done:
    """One command, in this process: a process for each would be most of the test's time."""
    environment = {"QMQ_BROKER_URL": broker.url}
    ended = CliRunner().invoke(root, [*arguments], input=given, env=environment)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return Done(returncode=ended.exit_code, stdout=ended.stdout, stderr=ended.stderr)


def answer_of(broker: BrokerProcess, *arguments: str) -> Any:
    done = qmq(broker, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sent(broker: BrokerProcess, subject: str, count: int) -> list[str]:
    lines = b"".join(b"message %d\n" % number for number in range(count))
    done = qmq(broker, "send", subject, "--lines", given=lines)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def rejected(broker: BrokerProcess, subject: str, group: str, count: int) -> None:
    """All messages of the subject are dead letters of the group."""

    @consumer(subject, group=group, wait_ms=100)
    def handler(delivery: Delivery) -> None:
        raise Reject(f"never {delivery.sequence}")

    with Consumers(handler, broker.url) as consumers:
        wait_for(lambda: next(iter(consumers.counters().values()))["rejected"] == count)


def test_what_is_sent_from_a_shell_is_what_tail_shows_and_a_consumer_gets(
    broker: BrokerProcess, subject: str
) -> None:
    words = ["--as", "json", "--key", "17", "--tag", "a", "--tag", "b", "--header", "tenant=acme"]
    done = qmq(broker, "send", subject, '{"number": 17}', *words)
    assert done.returncode == 0, done.stderr
    (message_id,) = done.stdout.split()
    with pull(broker.url, subject=subject, group="shell", wait_s=10) as (delivery,):
        assert delivery.message == Message(
            subject,
            {"number": 17},
            key="17",
            tags=("a", "b"),
            headers={"tenant": "acme"},
            message_id=message_id,
            born_at=delivery.message.born_at,
        )
        delivery.ack()
    shown = qmq(broker, "tail", subject)
    assert shown.stdout.startswith("0 ")
    assert f'{message_id} key=17 tags=a,b {{"number": 17}}' in shown.stdout
    (told,) = [
        json.loads(line) for line in qmq(broker, "tail", subject, "--json").stdout.split("\n")[:-1]
    ]
    assert (told["message_id"], told["body"]) == (message_id, {"number": 17})


def test_a_body_is_text_bytes_or_lines_from_standard_input(
    broker: BrokerProcess, subject: str
) -> None:
    assert qmq(broker, "send", subject, given="from the pipe ✓".encode()).returncode == 0
    assert qmq(broker, "send", subject, "--as", "bytes", given=b"raw").returncode == 0
    assert len(sent(broker, subject, 3)) == 3
    with pull(broker.url, subject=subject, group="shell", wait_s=10) as deliveries:
        bodies = [delivery.message.body for delivery in deliveries]
    assert bodies == ["from the pipe ✓", b"raw", "message 0", "message 1", "message 2"]


def test_a_send_repeated_under_its_id_is_stored_once(broker: BrokerProcess, subject: str) -> None:
    line = ["send", subject, "once", "--id", "ab" * 16, "--json"]
    first = json.loads(qmq(broker, *line).stdout)
    assert (first["count"], first["duplicates"]) == (1, 0)
    assert first["message_ids"] == ["ab" * 16]


def test_a_message_may_be_sent_for_later_and_for_a_time_only(
    broker: BrokerProcess, subject: str
) -> None:
    assert qmq(broker, "send", subject, "later", "--delay", "3600").returncode == 0
    assert qmq(broker, "send", subject, "now", "--ttl", "3600").returncode == 0
    with pull(broker.url, subject=subject, group="shell", wait_s=10) as (delivery,):
        message = delivery.message
        assert message.body == "now"
        assert message.expires_at is not None
        assert message.born_at is not None
        assert (message.expires_at - message.born_at).total_seconds() == 3600
        delivery.ack()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no good name", "x"], "subject"),
        (["shop", "x", "--ttl", "0"], "ttl"),
        (["shop", "{", "--as", "json"], "is not JSON"),
        (["shop", "x", "--header", "tenant"], "NAME=VALUE"),
        (["shop", "x", "--lines"], "--lines"),
        (["shop", "x", "--id", "7"], "32 lower-case hex digits. Leave it out"),
    ],
    ids=["subject", "ttl", "json", "header", "lines", "id"],
)
def test_a_send_that_cannot_work_is_a_wrong_call_and_sends_nothing(
    broker: BrokerProcess, words: list[str], told: str
) -> None:
    done = qmq(broker, "send", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_tail_shows_the_last_ones_or_those_from_a_sequence_on(
    broker: BrokerProcess, subject: str
) -> None:
    sent(broker, subject, 20)
    last = qmq(broker, "tail", subject, "-n", "3").stdout.splitlines()
    assert [line.split()[0] for line in last] == ["17", "18", "19"]
    middle = qmq(broker, "tail", subject, "-n", "2", "--first", "5").stdout.splitlines()
    assert [line.split()[0] for line in middle] == ["5", "6"]
    nothing = qmq(broker, "tail", "there_is_no_such_subject")
    assert nothing.returncode == 1
    assert "no subject" in nothing.stderr


def test_tail_continues_with_what_is_stored_from_now_on(
    broker: BrokerProcess, subject: str
) -> None:
    following = subprocess.Popen(
        [sys.executable, "-u", "-m", "qmq_client.cli", "tail", subject, "--follow"],
        env=os.environ | {"QMQ_BROKER_URL": broker.url, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        sent(broker, subject, 2)
        assert following.stdout is not None
        assert [following.stdout.readline().split()[0] for _ in range(2)] == ["0", "1"]
    finally:
        following.kill()
        following.communicate()


def test_subjects_are_listed_with_their_messages(broker: BrokerProcess, subject: str) -> None:
    sent(broker, subject, 4)
    (found,) = [
        one for one in answer_of(broker, "subjects")["subjects"] if one["subject"] == subject
    ]
    assert found == {
        "subject": subject,
        "first_sequence": 0,
        "next_sequence": 4,
        "messages": 4,
        "delayed": 0,
    }
    (line,) = [one for one in qmq(broker, "subjects").stdout.splitlines() if subject in one]
    assert line.split() == [subject, "0", "4", "4", "0"]


def test_lag_is_in_messages_and_over_a_bound_it_needs_attention(
    broker: BrokerProcess, subject: str
) -> None:
    sent(broker, subject, 5)
    with pull(broker.url, subject=subject, group="audit", max_messages=2, wait_s=10) as deliveries:
        for delivery in deliveries:
            delivery.ack()
    (behind,) = answer_of(broker, "lag", "--subject", subject)["lag"]
    assert (behind["group"], behind["lag"]) == ("audit", 3)
    asked = ["lag", "--subject", subject, "--group", "audit", "--messages-max"]
    assert qmq(broker, *asked, "3").returncode == 0
    over = qmq(broker, *asked, "2")
    assert over.returncode == 1
    assert over.stdout.splitlines()[1].split()[:3] == [subject, "audit", "3"]


def test_groups_are_paused_moved_configured_resumed_and_removed(
    broker: BrokerProcess, subject: str
) -> None:
    sent(broker, subject, 3)
    with pull(broker.url, subject=subject, group="audit", wait_s=10) as deliveries:
        for delivery in deliveries:
            delivery.ack()
    paused = answer_of(broker, "groups", "pause", subject, "audit")
    assert paused["is_paused"] is True
    listed = qmq(broker, "groups", "--subject", subject).stdout
    assert "paused" in listed
    assert qmq(broker, "groups", "list", "--subject", subject).stdout == listed
    moved = answer_of(broker, "groups", "seek", subject, "audit", "1")
    assert (moved["cursor"], moved["lag"]) == (1, 2)
    with pull(broker.url, subject=subject, group="audit") as deliveries:
        assert deliveries == []
    assert answer_of(broker, "groups", "resume", subject, "audit")["is_paused"] is False
    with pull(broker.url, subject=subject, group="audit", wait_s=10) as deliveries:
        assert [delivery.sequence for delivery in deliveries] == [1, 2]
        for delivery in deliveries:
            delivery.ack()
    assert answer_of(broker, "groups", "seek", subject, "audit", "2013-01-01")["cursor"] == 0
    set_to = answer_of(
        broker, "groups", "configure", subject, "audit", "--tag", "vip", "--max-attempts", "3"
    )
    assert (set_to["tags"]["any"], set_to["max_attempts"]) == (["vip"], 3)
    asked = qmq(broker, "groups", "remove", subject, "audit")
    assert asked.returncode == 1
    assert "nothing was removed" in asked.stderr
    asked = qmq(broker, "groups", "remove", subject, "audit", "--json")
    assert (asked.returncode, json.loads(asked.stdout)["groups"][0]["group"]) == (1, "audit")
    done = qmq(broker, "groups", "remove", subject, "audit", "--yes")
    assert (done.returncode, done.stdout) == (0, f"audit is removed from {subject}\n")
    assert answer_of(broker, "groups", "--subject", subject)["groups"] == []


@pytest.mark.parametrize(
    ("words", "exit_code", "told"),
    [
        (["groups", "pause", "shop", "nobody"], 1, "no group nobody"),
        (["groups", "remove", "shop", "nobody"], 1, "no group nobody"),
        (["groups", "seek", "shop", "nobody", "somewhere"], 2, "is not a position"),
        (["groups", "configure", "shop", "nobody"], 2, "nothing to change"),
        (["groups", "configure", "shop", "nobody", "--no-tags", "--tag", "a"], 2, "--no-tags"),
        (["dead", "list", "shop", "nobody"], 1, "no group nobody"),
        (["dead", "replay", "shop", "nobody", "--first", "3", "--next", "3"], 2, "--next"),
        (["message", "trace", "ab" * 15 + "00"], 1, "does not wait"),
        (["message", "trace", "7"], 2, "Copy it from"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else None,
)
def test_what_is_not_there_or_makes_no_sense_is_told_by_its_exit_code(
    broker: BrokerProcess, words: list[str], exit_code: int, told: str
) -> None:
    done = qmq(broker, *words)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_that_is_not_there_is_exit_code_3() -> None:
    for words in (["groups"], ["lag"], ["subjects"], ["tail", "shop"], ["send", "shop", "x"]):
        done = CliRunner().invoke(root, [*words, "--broker", "http://127.0.0.1:1"])
        assert (done.exit_code, "Traceback" in done.stderr) == (3, False), done.stderr


def test_a_broker_that_takes_no_messages_now_is_exit_code_3_with_all_of_its_reason(
    tmp_path: Path,
) -> None:
    reason = "the disk is being replaced, and when that is done it takes messages again; " * 3
    with BrokerProcess(tmp_path / "data") as own:
        changed = {"state": "read-only", "reason": reason.strip()}
        httpx.post(f"{own.url}/v1/state", json=changed, timeout=DEADLINE_S).raise_for_status()
        done = qmq(own, "send", "shop", "x")
    assert done.returncode == 3
    assert reason.strip() in done.stderr


def test_what_is_not_there_is_listed_as_none_and_for_programs_as_an_empty_list(
    tmp_path: Path,
) -> None:
    lists = {
        ("subjects",): "subjects",
        ("groups",): "groups",
        ("lag",): "lag",
        ("delayed", "list"): "delayed",
        ("message", "find", "--subject", "shop", "--key", "k"): "messages",
    }
    with BrokerProcess(tmp_path / "data") as own:
        for words, field in lists.items():
            assert qmq(own, *words).stdout == "none\n", words
            assert json.loads(qmq(own, *words, "--json").stdout)[field] == [], words


def test_C4_dead_letters_are_listed_shown_replayed_to_their_group_and_purged(
    broker: BrokerProcess, subject: str
) -> None:
    sent(broker, subject, 3)
    rejected(broker, subject, "audit", 3)
    listed = answer_of(broker, "dead", "list", subject, "audit")["dead"]
    assert [(one["sequence"], one["reason"], one["error"]) for one in listed] == [
        (number, "rejected", f"never {number}") for number in range(3)
    ]
    (shown,) = answer_of(broker, "dead", "show", subject, "audit", "1")["dead"]
    assert shown["message"]["body"] == "message 1"
    text = qmq(broker, "dead", "show", subject, "audit", "1").stdout
    assert "never 1" in text
    assert "message 1" in text
    asked = qmq(broker, "dead", "replay", subject, "audit")
    assert (asked.returncode, asked.stderr[:25]) == (1, "dead letters to replay: 3")
    for command in ("replay", "purge"):
        asked = qmq(broker, "dead", command, subject, "audit", "--next", "2", "--json")
        assert asked.returncode == 1
        assert json.loads(asked.stdout)["dead"] == listed[:2]
    done = qmq(broker, "dead", "replay", subject, "audit", "--first", "1", "--next", "2", "--yes")
    assert (done.returncode, done.stdout) == (0, "dead letters replayed: 1\n"), done.stderr
    with pull(broker.url, subject=subject, group="audit", wait_s=10) as (delivery,):
        assert (delivery.sequence, delivery.message.body) == (1, "message 1")
        delivery.ack()
    assert answer_of(broker, "dead", "purge", subject, "audit", "--yes") == {"count": 2, "gone": 0}
    assert answer_of(broker, "dead", "list", subject, "audit")["dead"] == []
    nothing = qmq(broker, "dead", "replay", subject, "audit")
    assert (nothing.returncode, nothing.stderr) == (0, "no dead letters to replay\n")
    assert qmq(broker, "dead", "show", subject, "audit", "0").returncode == 1


def test_the_story_of_a_message_names_who_had_it_and_where_it_is_now(
    broker: BrokerProcess, subject: str
) -> None:
    (message_id,) = sent(broker, subject, 1)
    rejected(broker, subject, "audit", 1)
    with pull(broker.url, subject=subject, group="billing", wait_s=10) as (delivery,):
        delivery.ack()
    (steps,) = answer_of(broker, "message", "trace", message_id)["stories"]
    assert (steps[0]["what"], steps[0]["sequence"]) == ("stored", 0)
    told = [(step["group"], step["what"]) for step in steps[1:]]
    assert told == [
        ("audit", "given"),
        ("audit", "rejected"),
        ("audit", "dead"),
        ("billing", "given"),
        ("billing", "acked"),
        ("audit", "dead"),
        ("billing", "passed"),
    ]
    text = qmq(broker, "message", "trace", message_id).stdout
    assert "now dead" in text
    assert "never 0" in text


def test_a_broker_of_the_configuration_is_asked(broker: BrokerProcess, tmp_path: Path) -> None:
    file = tmp_path / "qmq.toml"
    file.write_text(f'[broker]\nurl = "{broker.url}"\n')
    assert qmq(broker, "groups", "--config", str(file), "--json").returncode == 0


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_message_that_is_still_in_an_outbox_is_found_there(
    broker: BrokerProcess, tmp_path: Path, command: str
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url)
    create_tables(engine)
    producer = Producer(engine, "http://127.0.0.1:9")
    with Session(engine) as session, session.begin():
        message_id = str(producer.send(Message("shop", {"n": 1}), session=session))
    producer.close(deadline_s=0)
    engine.dispose()
    gone = f"sqlite:///{tmp_path / 'no' / 'such.db'}"
    found = qmq(broker, "message", command, message_id, "--database", url)
    assert (found.returncode, "is in the outbox of" in found.stdout) == (0, True), found
    (row,) = answer_of(broker, "message", command, message_id, "--database", url)["outbox"]
    assert (row["message_id"], row["state"], row["subject"]) == (message_id, "live", "shop")
    missing = qmq(broker, "message", command, "5e" * 16, "--database", url)
    assert (missing.returncode, "nor is it in the outbox" in missing.stderr) == (1, True)
    assert qmq(broker, "message", command, message_id, "--database", gone).returncode == 3
