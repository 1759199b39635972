"""`qmq broker keepers | remove-keeper`, and what status, doctor and metrics say, on a real broker that would delete."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.doctor.broker import broker as examined
from qmq_client.wire.message_id import MessageIds
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.pipeline.world import FORGETFUL, DataDirectory, messages

#: Everything in the directory is older than an hour.
AT_ONCE = ("--retain-hours", "1", "--reserve-bytes", "0")
FOR_EVER = ("--retain-hours", "800000", "--reserve-bytes", "0")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["broker", *arguments])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Old segments that a keeper has not got, and that retention would delete."""
    directory = DataDirectory(tmp_path / "data", FORGETFUL)
    directory.append(messages(MessageIds(1), 4000, subjects=("orders",)), frame_records=20)
    store_id = directory.store.store_id.hex()
    directory.close()
    told = {"name": "archive", "store_id": store_id, "kept_offset": 0, "kept_actions_offset": 0}
    with BrokerProcess(directory.path, *FOR_EVER) as process:
        assert (
            httpx.post(f"{process.url}/v1/keepers/keep", json=told, timeout=DEADLINE_S).status_code
            == 200
        )
        process.stop()
    return directory.path


def test_X1_B12_a_keeper_that_is_not_run_is_listed_found_and_removed(data: Path) -> None:
    with BrokerProcess(data, *AT_ONCE) as process:
        there = ("--broker", process.url)
        (listed,) = json.loads(run("keepers", *there, "--json").output)["keepers"]
        assert (listed["name"], listed["kept_offset"]) == ("archive", 0)
        head, line = run("keepers", *there).output.splitlines()
        assert head.split()[:2] == ["name", "kept_offset"]
        assert line.split()[:2] == ["archive", "0"]
        assert run("status", *there).output.splitlines()[0] == "serving"
        assert line.split()[0] in run("status", *there).output
        assert json.loads(run("status", *there, "--json").output)["keepers"][0]["name"] == "archive"
        (finding,) = examined(process.url)
        assert finding.id == "broker.keeper"
        assert f"{listed['held_bytes']} bytes" in finding.read
        metrics = httpx.get(f"{process.url}/metrics", timeout=DEADLINE_S).text
        assert (
            f'qmq_broker_keeper_held_bytes{{keeper="archive"}} {listed["held_bytes"]}.0' in metrics
        )
        command = finding.fix.split("qmq broker ")[1].split()
        assert run(*command).exit_code == 0, "the fix is a command that runs as it stands"
        assert run("keepers", *there).output == "none\n"
        process.wait_for("segments given up: ")
        assert list(examined(process.url)) == []
        gone = run("remove-keeper", "archive", *there)
        assert (gone.exit_code, "no keeper archive" in gone.output) == (1, True)


@pytest.mark.parametrize("command", ["keepers", "remove-keeper"])
def test_help_tells_the_variable_and_the_exit_codes(command: str) -> None:
    shown = " ".join(run(command, "--help").output.split())
    for text in ("QMQ_BROKER_URL", "Exit codes: 0", "3 no broker answers"):
        assert text in shown
