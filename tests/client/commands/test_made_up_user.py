"""Commands of a user whom the machine does not know: a made-up id without a home, as in containers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import require_program
from tests.kit.broker_process import ROOT, SERVE, BrokerProcess
from tests.kit.waiting import wait_for
from tests.pipeline.world import DataDirectory

MADE_UP_ID = 1_987_654_321
UP = ("-m", "qmq_client", "up")
WATCHDOG = ("-m", "qmq_client", "watchdog", "run")
CONSUME = ("-m", "qmq_client", "consume", "shop")
SHOP = ("--database", "sqlite:///shop.db")
NOWHERE = ("--broker", "http://127.0.0.1:9")
HANDLERS = """
from qmq_client import consumer

@consumer("orders", group="audit")
def audit(body: str) -> None:
    print("handled", body, flush=True)
"""

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        os.chown(made, MADE_UP_ID, MADE_UP_ID)
        yield Path(made)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "pipeline")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path},
        user=MADE_UP_ID,
        group=MADE_UP_ID,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("--version",), "qmq"),
        (("doctor", *SHOP), "shop: sound"),
        (("db", "check", *SHOP), "shop: as it should be"),
        (("db", "sql", *SHOP), "CREATE TABLE"),
        (("outbox", "list", *SHOP), "live 0"),
        (("watchdog", "sweep", *SHOP, *NOWHERE), "sweep database=shop"),
        (("watchdog", "databases", "init"), "registry.url: none is configured"),
        (("message", "show", "0" * 32, *SHOP, *NOWHERE), "the broker could not be asked"),
        (("broker", "status", *NOWHERE), "no connection"),
        (("config", "show"), "broker"),
        (("store", "verify", "none"), "none"),
        (
            ("broker", "token", "add", "app", "--tokens", "tokens.json", "--role", "producer"),
            "app",
        ),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else "",
)
def test_a_command_works_or_says_what_is_missing(
    folder: Path, command: tuple[str, ...], said: str
) -> None:
    assert "shop: empty ->" in as_that_user(folder, "db", "migrate", *SHOP)
    ran = run(folder, "-m", "qmq_client", *command)
    assert said in ran.stdout + ran.stderr
    assert "unexpected" not in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_session_of_spark_says_that_its_user_has_no_name(folder: Path) -> None:
    ran = run(folder, "-c", "from qmq_pipeline.spark.session import get_session; get_session()")
    last = ran.stderr.strip().splitlines()[-1]
    assert "JavaError: Spark needs a user with a name" in last
    assert f"useradd --uid {MADE_UP_ID}" in last


@pytest.mark.parametrize(
    "words",
    [
        ("ingest", "--path", "data"),
        ("lifecycle",),
        ("marts",),
        ("audit",),
        ("report",),
        ("run", "--path", "data"),
        ("archive", "--path", "data"),
        ("replay", "--where", "TRUE", "--to", "subject:a"),
    ],
    ids=lambda words: words[0],
)
def test_every_command_of_the_pipeline_says_that_its_user_has_no_name(
    folder: Path, words: tuple[str, ...]
) -> None:
    DataDirectory(folder / "data").close()
    (folder / "tables").mkdir()
    for path in folder.rglob("*"):
        os.chown(path, MADE_UP_ID, MADE_UP_ID)
    ran = run(folder, "-m", "qmq_client", "pipeline", words[0], "--tables", "tables", *words[1:])
    assert ran.returncode != 0
    (last,) = ran.stderr.strip().splitlines()[-1:]
    assert "Spark needs a user with a name" in last, ran.stderr
    assert f"useradd --uid {MADE_UP_ID}" in last
    assert "Traceback" not in ran.stderr


def serving(folder: Path, *words: str, command: tuple[str, ...]) -> BrokerProcess:
    """A service as that user, without HOME."""
    setpriv = require_program("setpriv", "util-linux")
    as_nobody = (setpriv, f"--reuid={MADE_UP_ID}", f"--regid={MADE_UP_ID}", "--clear-groups")
    return BrokerProcess(
        folder / "data", *words, command=command, under=("env", "-u", "HOME", *as_nobody)
    )


def as_that_user(folder: Path, *words: str) -> str:
    ran = run(folder, "-m", "qmq_client", *words)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_broker_serves_and_its_client_commands_work(folder: Path) -> None:
    with serving(folder, command=SERVE) as broker:
        where = ("--broker", broker.url)
        as_that_user(folder, "send", "orders", "hello", *where)
        assert "orders" in as_that_user(folder, "subjects", *where)
        assert "hello" in as_that_user(folder, "tail", "orders", *where)
        assert broker.stop() == 0
        assert "Traceback" not in broker.log


def test_up_runs_a_broker_and_a_watchdog(folder: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    with serving(folder, "--database", url, "--migrate", command=UP) as running:
        running.wait_for("watchdog.started")
        as_that_user(folder, "send", "orders", "hello", "--broker", running.url)
        assert running.stop() == 0
        assert "Traceback" not in running.log


@contextmanager
def service(folder: Path, *words: str) -> Iterator[Callable[[], str]]:
    """A program as that user; gives what it has written. It must end well on SIGTERM."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "watchdog"), str(folder)])
    said = folder / "said"
    with said.open("w") as log:
        running = subprocess.Popen(
            [sys.executable, *words],
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path},
            user=MADE_UP_ID,
            group=MADE_UP_ID,
            extra_groups=[],
            stdout=log,
            stderr=log,
        )
    try:
        yield said.read_text
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
    assert "Traceback" not in said.read_text()


def test_a_watchdog_runs_as_a_service_of_its_own(folder: Path) -> None:
    as_that_user(folder, "db", "migrate", *SHOP)
    with service(folder, *WATCHDOG, *SHOP, *NOWHERE) as said:
        wait_for(lambda: "watchdog.started" in said(), "the watchdog")


def test_consumers_run_as_a_service(folder: Path) -> None:
    (folder / "shop.py").write_text(HANDLERS)
    with serving(folder, command=SERVE) as broker:
        as_that_user(folder, "send", "orders", "hello", "--broker", broker.url)
        with service(folder, *CONSUME, "--broker", broker.url) as said:
            wait_for(lambda: "handled hello" in said(), "the handler")
