"""Commands of a user whom the machine does not know: a made-up id without a home, as in containers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.broker_process import ROOT

MADE_UP_ID = 1_987_654_321

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
        (("db", "migrate", "--database", "sqlite:///shop.db"), "shop: empty ->"),
        (("config", "show"), "broker"),
        (("store", "verify", "none"), "none"),
    ],
)
def test_a_command_works_or_says_what_is_missing(
    folder: Path, command: tuple[str, ...], said: str
) -> None:
    ran = run(folder, "-m", "qmq_client", *command)
    assert said in ran.stdout + ran.stderr
    assert "unexpected" not in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_session_of_spark_says_that_its_user_has_no_name(folder: Path) -> None:
    ran = run(folder, "-c", "from qmq_pipeline.spark.session import get_session; get_session()")
    last = ran.stderr.strip().splitlines()[-1]
    assert "JavaError: Spark needs a user with a name" in last
    assert f"useradd --uid {MADE_UP_ID}" in last
