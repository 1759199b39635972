"""What `qmq broker status` and the doctor say of the broker's bounds, and `qmq subjects remove`."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.doctor.broker import broker
from qmq_client.wire.message_id import MessageIds
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.pipeline.world import FORGETFUL, DataDirectory, messages


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, list(arguments))


def test_B10_status_shows_what_is_used_of_each_bound(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        there = ("--broker", process.url)
        assert run("send", "orders", "1", *there).exit_code == 0
        pull = {"subject": "orders", "group": "g", "consumer": "c", "wait_ms": 0}
        pulled = httpx.post(f"{process.url}/v1/pull", json=pull, timeout=DEADLINE_S)
        assert pulled.status_code == 200
        first, *shown = run("broker", "status", *there).output.splitlines()
        assert first == "serving"
        rows = {line.split()[0]: line.split()[1:] for line in shown}
        assert rows["subjects"] == ["1", "10000"]
        assert rows["groups"] == ["1", "10000"]
        assert 0 < int(rows["groups_bytes"][0]) < 20_000
        assert rows["groups_bytes"][1] == str(512 * 1024 * 1024)
        room = json.loads(run("broker", "status", *there, "--json").output)["room"]
        metrics = httpx.get(f"{process.url}/metrics", timeout=DEADLINE_S).text
        for one in room["bounds"]:
            assert f'qmq_broker_bound_limit{{bound="{one["name"]}"}}' in metrics
        assert 'qmq_broker_bound_used{bound="subjects"} 1.0' in metrics
        assert list(broker(process.url)) == []


@pytest.mark.parametrize("command", [["subjects"], ["subjects", "list"]])
def test_subjects_are_listed(tmp_path: Path, command: list[str]) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        there = ("--broker", process.url)
        assert run("send", "orders", "1", *there).exit_code == 0
        assert run(*command, *there).output.splitlines()[1].split() == [
            "orders",
            "0",
            "1",
            "1",
            "0",
        ]


def test_a_subject_in_use_is_not_removed_and_the_answer_says_why(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        there = ("--broker", process.url)
        assert run("send", "orders", "1", *there).exit_code == 0
        asked = run("subjects", "remove", "orders", *there)
        assert (asked.exit_code, "it still has messages: 1\n" in asked.output) == (1, True)
        refused = run("subjects", "remove", "orders", "--yes", *there)
        assert refused.exit_code == 1
        assert "messages: 1" in refused.output
        missing = run("subjects", "remove", "bills", "--yes", *there)
        assert (missing.exit_code, "there is no subject bills" in missing.output) == (1, True)


@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "after a restart"])
def test_a_subject_that_has_only_delayed_messages_is_listed_and_says_so(
    tmp_path: Path, is_restarted: bool
) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        there = ("--broker", process.url)
        for _ in range(2):
            assert run("send", "later", "x", "--delay", "3600", *there).exit_code == 0
        if is_restarted:
            process.kill()
            process.start()
            there = ("--broker", process.url)
        (listed,) = json.loads(run("subjects", "--json", *there).output)["subjects"]
        assert listed == {
            "subject": "later",
            "first_sequence": 0,
            "next_sequence": 0,
            "messages": 0,
            "delayed": 2,
        }
        used = {
            one["name"]: one["used"]
            for one in httpx.get(f"{process.url}/v1/room", timeout=DEADLINE_S).json()["bounds"]
        }
        assert used["subjects"] == 1
        asked = run("subjects", "remove", "later", *there)
        assert asked.exit_code == 1
        assert asked.output.splitlines()[1].split() == ["later", "0", "0", "0", "2"]
        assert "it still has delayed messages: 2\n" in asked.output
        refused = run("subjects", "remove", "later", "--yes", *there)
        assert (refused.exit_code, "delayed messages: 2" in refused.output) == (1, True)
        assert run("tail", "later", *there).exit_code == 0
        (waiting,) = {one["subject"] for one in _delayed(process)}
        assert waiting == "later"
        ids = [one["message_id"] for one in _delayed(process)]
        assert run("delayed", "cancel", *ids, *there).exit_code == 0
        asked = run("subjects", "remove", "later", *there)
        assert (asked.exit_code, "add --yes" in asked.output) == (1, True)
        assert run("subjects", "remove", "later", "--yes", *there).exit_code == 0
        assert run("subjects", *there).output == "none\n"


def _delayed(process: BrokerProcess) -> list[dict[str, str]]:
    listed: list[dict[str, str]] = json.loads(
        run("delayed", "list", "--json", "--broker", process.url).output
    )["delayed"]
    return listed


def test_B12_an_empty_subject_is_removed_for_good(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "data", FORGETFUL)
    directory.append(messages(MessageIds(1), 20, subjects=("old",)), frame_records=20)
    directory.append(messages(MessageIds(2), 4000, subjects=("orders",)), frame_records=20)
    directory.close()
    retaining = ("--retain-hours", "1", "--reserve-bytes", "0")
    with BrokerProcess(directory.path, *retaining) as process:
        process.wait_for("segments given up: ")
        remove = ("subjects", "remove", "old", "--yes", "--broker", process.url)
        removed = run(*remove)
        while "retention is removing" in removed.output:
            removed = run(*remove)
        assert (removed.exit_code, removed.output) == (0, "old is removed\n")
        process.kill()
        process.start()
        listed = json.loads(run("subjects", "--json", "--broker", process.url).output)["subjects"]
        assert [one["subject"] for one in listed] == ["orders"]
