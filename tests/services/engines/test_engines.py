"""A message system is found by its address or started, and ends with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.kit.processes import is_running
from tests.kit.waiting import wait_for
from tests.services.drivers import ROOT
from tests.services.engines.ladder import Engine, listens, start_engine
from tests.services.engines.programs import project_of
from tests.services.engines.recipes import MODES, RECIPES, Mode
from tests.services.ladder import ServiceMissingError
from tests.services.rungs import RungError

#: Those that start in moments; the benchmarks' tests start the others.
QUICK = ("nats", "redis")
DEADLINE_S = 100.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", QUICK)
def test_a_server_is_started_and_ends_when_it_is_closed(
    tmp_path: Path, name: str, mode: Mode
) -> None:
    engine = start_engine(name, tmp_path / "data", mode=mode, environment={})
    assert engine.rung == "private"
    assert listens(("127.0.0.1", engine.port))
    assert engine.processes
    engine.close()
    engine.close()
    assert not listens(("127.0.0.1", engine.port))


def test_a_killed_server_has_its_data_again(tmp_path: Path) -> None:
    engine = start_engine("redis", tmp_path / "data", environment={})
    ask(engine, b"SET kept 1")
    engine.kill()
    again = start_engine("redis", tmp_path / "data", environment={})
    assert ask(again, b"GET kept") == b"$1\r\n1\r\n"
    again.close()


def ask(engine: Engine, command: bytes) -> bytes:
    import socket

    with socket.create_connection(("127.0.0.1", engine.port)) as connection:
        connection.sendall(command + b"\r\n")
        return connection.recv(100)


def test_a_server_that_the_environment_names_is_used_and_left_alone(tmp_path: Path) -> None:
    theirs = start_engine("redis", tmp_path / "theirs", environment={})
    named = {"QMQ_TEST_REDIS_ADDRESS": theirs.address}
    engine = start_engine("redis", tmp_path / "ours", environment=named)
    assert (engine.address, engine.rung, engine.processes) == (theirs.address, "environment", [])
    engine.close()
    assert listens(("127.0.0.1", theirs.port))
    theirs.close()
    with pytest.raises(AssertionError, match=r"QMQ_TEST_REDIS_ADDRESS names .*nobody listens"):
        start_engine("redis", tmp_path / "ours", environment=named)


@pytest.mark.parametrize("name", RECIPES)
def test_what_cannot_be_had_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    def get(_: object) -> None:
        raise RungError("no such luck")

    monkeypatch.setattr(RECIPES[name], "get", get)
    with pytest.raises(ServiceMissingError) as caught:
        start_engine(name, tmp_path / "data", environment={})
    told = str(caught.value)
    assert f"no {name} for the tests. environment: QMQ_TEST_{name.upper()}_ADDRESS is not" in told
    assert f"private: no such luck (to have one: {RECIPES[name].remedy})" in told


def test_a_rung_may_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(ServiceMissingError, match="private: not among the rungs"):
        start_engine("nats", tmp_path / "data", environment={"QMQ_TEST_RUNGS": "environment"})


def test_a_server_that_does_not_start_shows_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RECIPES["redis"], "setting", lambda *_: "appendfsync sometimes")
    with pytest.raises(ServiceMissingError, match=r"does not start: .*appendfsync"):
        start_engine("redis", tmp_path / "data", environment={})


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends them")
@pytest.mark.parametrize("name", [*QUICK, "rabbitmq"])
def test_no_process_of_a_server_outlives_the_one_that_started_it(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "tests.services.engines.test_engines", name, str(tmp_path)]
    starter = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    said = starter.stdout.readline()
    if not said:
        raise RungError(f"{name} was not started")
    processes = [int(number) for number in said.split()]
    assert all(map(is_running, processes))
    starter.send_signal(signal.SIGKILL)
    starter.communicate(timeout=DEADLINE_S)
    wait_for(lambda: not any(map(is_running, processes)))


def test_a_project_for_maven_names_its_artifacts_and_no_index() -> None:
    space = "{http://maven.apache.org/POM/4.0.0}"
    project = ET.fromstring(project_of(["a.b:c:1", "d.e:f_2:3"]))
    found = [
        [one.text for one in dependency]
        for dependency in project.iterfind(f"{space}dependencies/{space}dependency")
    ]
    assert found == [["a.b", "c", "1"], ["d.e", "f_2", "3"]]
    assert not list(project.iter(f"{space}repository"))


def be_a_starter(name: str, folder: str) -> None:
    """Say which processes serve, and stay."""
    engine = start_engine(name, Path(folder) / "data", environment=os.environ)
    print(*engine.processes, flush=True)
    signal.pause()


if __name__ == "__main__":
    be_a_starter(sys.argv[1], sys.argv[2])
