"""The file of loaded classes: made once by a start that is not the first, used by all after it, never in the way."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from qmq_pipeline.spark.java import find_java
from qmq_pipeline.spark.shared_classes import SharedClasses, jvm_arguments, key_of, shared_classes
from tests.pipeline.world import START_MS

DAY_MS = 86_400_000
BOOT = "first"
HEAD = b"\xa8\xab\x0b\xf0"


def start(folder: Path, now_ms: int = START_MS, key: str = "a") -> SharedClasses:
    return shared_classes(folder, key, now_ms, BOOT)


def file_to_make(classes: SharedClasses) -> Path:
    assert classes.is_made
    return Path(classes.arguments[0].removeprefix("-XX:ArchiveClassesAtExit="))


def put(path: Path, data: bytes, at_ms: int = START_MS) -> Path:
    path.write_bytes(data)
    os.utime(path, (at_ms / 1000, at_ms / 1000))
    return path


def test_the_second_start_makes_the_file_and_those_after_it_use_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "classes"
    assert start(folder) == SharedClasses()
    path = file_to_make(start(folder))
    assert path.parent == folder
    assert start(folder) == SharedClasses(), "another one at once would make it twice"
    put(path, HEAD + bytes(100))
    for at_ms in (START_MS, START_MS + 29 * DAY_MS, START_MS + 58 * DAY_MS):
        used = start(folder, at_ms)
        assert used.file == folder / "a-104.jsa"
        assert used.arguments[0] == f"-XX:SharedArchiveFile={used.file}"
        assert not used.is_made
    put(folder / "a-104.jsa", HEAD + bytes(99))
    assert start(folder) == SharedClasses(), "a JVM may die of a file that was cut short"


def test_a_draft_from_before_the_machine_started_anew_is_not_taken(tmp_path: Path) -> None:
    """Of what was not synced a power cut may have left the head alone."""
    start(tmp_path)
    put(file_to_make(start(tmp_path)), HEAD)
    assert shared_classes(tmp_path, "a", START_MS, "second") == SharedClasses()
    assert start(tmp_path).file is not None
    assert shared_classes(tmp_path, "a", START_MS, "second").file is not None, "it was synced"


def test_one_that_was_not_finished_is_passed_over_made_again_a_day_later_and_goes(
    tmp_path: Path,
) -> None:
    start(tmp_path)
    torn = put(file_to_make(start(tmp_path)), bytes(4096))
    assert start(tmp_path) == SharedClasses()
    later_ms = START_MS + DAY_MS + 1000
    again = file_to_make(start(tmp_path, later_ms))
    assert again != torn
    assert not torn.exists()
    put(again, HEAD, later_ms)
    assert start(tmp_path, later_ms).file == tmp_path / "a-4.jsa"


def test_a_file_that_nobody_started_with_for_a_month_goes(tmp_path: Path) -> None:
    old, of_others = put(tmp_path / "b-4.jsa", HEAD), put(tmp_path / "c-4.jsa", HEAD)
    start(tmp_path, START_MS + 20 * DAY_MS, key="c")
    start(tmp_path, START_MS + 31 * DAY_MS)
    assert (old.exists(), of_others.exists()) == (False, True)


def test_where_no_folder_can_be_made_a_start_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    for _ in range(3):
        assert start(tmp_path / "cache" / "classes") == SharedClasses()


def test_a_file_is_for_one_java_one_spark_and_one_class_path(tmp_path: Path) -> None:
    java, jars = tmp_path / "java", tmp_path / "jars"
    (java / "bin").mkdir(parents=True)
    jars.mkdir()
    put(java / "release", b"17")
    put(java / "bin" / "java", b"17")
    nothing: dict[str, str] = {}
    same = (java, jars, nothing, {"PATH": "/bin"})
    known = {key_of(*same), key_of(*same)}
    assert len(known) == 1
    known.add(key_of(java, jars, {"spark.driver.extraClassPath": "/more"}, {}))
    known.add(key_of(java, jars, {}, {"HADOOP_CONF_DIR": "/etc/hadoop"}))
    put(java / "release", b"21", START_MS + 1000)
    known.add(key_of(*same))
    put(jars / "new.jar", b"", START_MS)
    os.utime(jars, (START_MS / 1000, START_MS / 1000))
    known.add(key_of(*same))
    known.add(key_of(tmp_path, jars, {}, {}))
    assert len(known) == 6


def test_what_the_user_has_for_the_jvm_stays_and_comes_last() -> None:
    ours = ("-XX:SharedArchiveFile=/with a blank/x.jsa", "-Xlog:disable")
    environment = {"SPARK_SUBMIT_OPTS": "-Xlog:gc"}
    with jvm_arguments(ours, environment):
        said = environment["SPARK_SUBMIT_OPTS"]
    assert said == '"-XX:SharedArchiveFile=/with a blank/x.jsa" -Xlog:disable -Xlog:gc'
    assert environment == {"SPARK_SUBMIT_OPTS": "-Xlog:gc"}
    nothing: dict[str, str] = {}
    with jvm_arguments(ours, nothing):
        assert nothing["SPARK_SUBMIT_OPTS"].endswith("-Xlog:disable")
    assert nothing == {}


@pytest.mark.parametrize("damage", [None, "no such file", "no such content"])
def test_a_jvm_takes_what_it_made_and_goes_on_without_what_is_none(
    tmp_path: Path, damage: str | None
) -> None:
    home = Path(find_java(os.environ, (4, 3), tmp_path).home)

    def run(classes: SharedClasses) -> str:
        line = [str(home / "bin" / "java"), *classes.arguments, "-XshowSettings:vm", "-version"]
        said = subprocess.run(line, capture_output=True, text=True)
        assert said.returncode == 0, said.stderr
        assert said.stdout == "", "standard output is the program's"
        return said.stderr

    start(tmp_path)
    made = start(tmp_path)
    run(made)
    if not file_to_make(made).exists():
        pytest.skip("this Java has no classes of its own to build on")
    used = start(tmp_path)
    assert used.file is not None
    if damage == "no such file":
        used.file.unlink()
    elif damage == "no such content":
        used.file.chmod(0o600)
        used.file.write_text("no classes")
    is_shared = "sharing" in run(used)
    assert is_shared is (damage is None)


@pytest.mark.timeout(1200)
def test_a_session_starts_with_the_file_of_the_one_before(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("five JVMs more; --release starts them")
    program = (
        "from qmq_pipeline.spark.session import get_session\n"
        "spark = get_session()\n"
        "print(spark.range(10).count())\n"
        "beans = spark._jvm.java.lang.management.ManagementFactory\n"
        "bean = beans.getRuntimeMXBean()\n"
        "said = bean.getInputArguments().toString()\n"
        "print('ArchiveClassesAtExit' in said, 'SharedArchiveFile' in said, bean.getPid())\n"
        "spark.stop()\n"
    )
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }

    def run() -> list[str]:
        line = [sys.executable, "-c", program]
        done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # A JVM that dies says so on standard output, too.
        *words, jvm = done.stdout.split()[-4:]
        wait_for_the_end_of(int(jvm))
        return words

    plain, makes, uses = ["10", "False", "False"], ["10", "True", "False"], ["10", "False", "True"]
    assert [run() for _ in range(3)] == [plain, makes, uses]
    (file,) = (tmp_path / "qmq" / "classes").glob("*.jsa")
    # A file that a JVM dies of, whatever it may be that made it so.
    half = file.read_bytes()[: file.stat().st_size // 2]
    put(file.with_stem(f"{file.stem.split('-')[0]}-{len(half)}"), half)
    file.unlink()
    assert run() == plain
    assert not list(file.parent.glob("*.jsa"))


def wait_for_the_end_of(process: int) -> None:
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 300)[0], "the JVM goes on"
    finally:
        os.close(handle)
