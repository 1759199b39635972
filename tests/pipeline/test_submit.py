"""The built wheel under `spark-submit`, on a cluster of two executors on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from qmq_client.wire.message_id import MessageIds
from tests.pipeline.world import DataDirectory, messages

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
#: Two executors of one core; as little memory as Spark takes.
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "88m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("spark")]


def test_the_wheel_ingests_under_spark_submit_with_its_code_shipped_to_two_executors(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("builds the wheel and starts four JVMs; --release does")
    from qmq_pipeline.spark.java import cache_folder, find_java

    code, home = shipped_code(tmp_path), spark_home(tmp_path / "spark")
    (program,) = re.findall(r"```\n(from qmq_pipeline.*?)```", PAGE, re.DOTALL)
    (tmp_path / "qmq_job.py").write_text(program)
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 500))
    directory.close()
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            *(
                str(Path(sys.executable).parent / "spark-submit"),
                "--master",
                "local-cluster[2,1,600]",
            ),
            *(
                "--driver-memory",
                "600m",
                *settings,
                "--py-files",
                str(code),
                "qmq_job.py",
                "ingest",
            ),
            *("--tables", str(tmp_path / "tables"), "--path", str(directory.path), "--json"),
        ],
        cwd=tmp_path,
        env={
            **environment,
            "JAVA_HOME": find_java(os.environ, (4, 0), cache_folder(os.environ)).home,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(home),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"]["messages"] == 500
    shipped = list((home / "work").glob(f"*/*/{code.name}"))
    assert len(shipped) == 2, "an executor did not get the code"


def test_the_wheel_under_the_name_of_a_zip_file_is_the_commands_and_the_sources(
    tmp_path: Path,
) -> None:
    """What executors do with shipped code, without Spark: import it from where it was put."""
    code = shipped_code(tmp_path)
    program = (
        "import pkgutil, qmq_pipeline.cli, qmq_pipeline.jobs.run, qmq_pipeline.sources.register\n"
        "print(qmq_pipeline.cli.__file__, *sorted(qmq_pipeline.cli.pipeline.commands))\n"
        f"print(*(one.name for one in pkgutil.iter_modules([{str(code)!r}])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file, *commands), found = (line.split() for line in done.stdout.splitlines())
    assert file.startswith(str(code))
    assert {"ingest", "audit", "run"} <= set(commands)
    assert {"pyspark_qmq", "pyspark_qmq_outbox"} <= set(found), "Spark would not find the formats"


def spark_home(folder: Path) -> Path:
    """The installed Spark in a folder of its own: workers write beside it."""
    folder.mkdir()
    installed = find_spec("pyspark")
    assert installed is not None
    assert installed.origin is not None
    for one in Path(installed.origin).parent.iterdir():
        (folder / one.name).symlink_to(one)
    return folder


def shipped_code(folder: Path) -> Path:
    """The wheel under the name that Spark takes for code: a wheel is a zip file."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*build, str(folder), str(ROOT)], check=True)
    (wheel,) = folder.glob("qmq-*.whl")
    return wheel.rename(folder / "qmq.zip")
