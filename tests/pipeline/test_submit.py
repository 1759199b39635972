"""The built wheel under `spark-submit`, on a standalone cluster of two workers on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from qmq_client.commands.exit_codes import ATTENTION
from qmq_client.wire.message_id import MessageIds
from tests.pipeline.quick import QUICK
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
#: Two executors of one core; as little memory as Spark takes.
SETTINGS = {
    **QUICK,
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.extraJavaOptions": QUICK["spark.driver.extraJavaOptions"],
    "spark.executor.memory": "512m",
    "spark.executor.memoryOverhead": "88m",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("spark")]


def test_P4_the_wheel_does_every_job_under_spark_submit_on_a_standalone_cluster_of_two_workers(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("builds the wheel and starts seven JVMs; --release does")
    from qmq_pipeline.spark.session import cache_folder, find_java

    code, home = shipped_code(tmp_path), spark_home(tmp_path / "spark")
    (program,) = re.findall(r"```\n(from qmq_pipeline.*?)```", PAGE, re.DOTALL)
    (tmp_path / "qmq_job.py").write_text(program)
    directory, database = (
        DataDirectory(tmp_path / "broker"),
        OutboxDatabase(tmp_path / "orders.db"),
    )
    *every, lost = messages(MessageIds(1), 501)
    directory.append(every)
    directory.close()
    database.insert([*every, lost], created_at_ms=START_MS)
    database.close()
    settings = [word for name, value in SETTINGS.items() for word in ("--conf", f"{name}={value}")]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "JAVA_HOME": find_java(os.environ, (4, 0), cache_folder(os.environ)).home,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(home),
    }
    submit = [str(Path(sys.executable).parent / "spark-submit"), "--driver-memory", "600m"]
    read = ["--tables", str(tmp_path / "tables"), "--path", str(directory.path)]
    with standalone_cluster(home, environment) as master:
        done = subprocess.run(
            [
                *(*submit, "--master", master, *settings, "--py-files", str(code)),
                *("qmq_job.py", "run", *read, "--database", database.section.url, "--json"),
            ],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == ATTENTION, done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert last.startswith("{"), last
    found = json.loads(last)
    assert found["ingested"]["rows"]["messages"] == 500
    assert (found["audit"]["committed"], found["audit"]["stored"]) == (501, 500)
    assert found["audit"]["findings"] == {
        **dict.fromkeys(("ghost", "duplicate", "late", "altered", "skipped"), 0),
        "lost": 1,
    }
    shipped = list((home / "work").glob(f"*/*/*/{code.name}"))
    assert len({one.parents[2] for one in shipped}) == 2, "an executor did not get the code"


@contextmanager
def standalone_cluster(home: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a master with two workers of one core each, every one a process of its own."""
    deploy = "org.apache.spark.deploy"
    started: list[tuple[subprocess.Popen[str], Thread]] = []

    def start(*line: str, until: str) -> str:
        process = subprocess.Popen(
            [str(home / "bin" / "spark-class"), *line],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        said = next(line for line in process.stderr if until in line)
        rest = Thread(target=process.stderr.read)  # or it would stand still one day
        rest.start()
        started.append((process, rest))
        return said

    here = ("--host", "127.0.0.1", "--webui-port", "0")
    try:
        said = start(
            f"{deploy}.master.Master", *here, "--port", "0", until="Starting Spark master at"
        )
        master = said.split()[-1]
        for number in range(2):
            work = (
                "--cores",
                "1",
                "--memory",
                "600m",
                "--work-dir",
                str(home / "work" / str(number)),
            )
            start(f"{deploy}.worker.Worker", *here, *work, master, until="registered with master")
        yield master
    finally:
        for process, _ in started:
            process.terminate()
        for process, rest in started:
            rest.join(60)
            process.communicate()


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
    """The wheel under the name that Spark takes for code: a wheel is a zip file.

    As the page has it, so that it fits each Python.
    """
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    environment = {**os.environ, "QMQ_BUILD_KERNEL": "0"}
    subprocess.run([*build, str(folder), str(ROOT)], check=True, env=environment)
    (wheel,) = folder.glob("qmq-*.whl")
    return wheel.rename(folder / "qmq.zip")
