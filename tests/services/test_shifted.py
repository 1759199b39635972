"""Clocks that tests set: what one test clears away is not what another one uses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.services.shifted import remove_what_ended_ones_shared


def test_only_what_processes_shared_that_have_ended_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    for process in (ended.pid, os.getpid()):
        for name in (f"faketime_shm_{process}", f"sem.faketime_sem_{process}"):
            (tmp_path / name).touch()
    (tmp_path / "of somebody else").touch()
    remove_what_ended_ones_shared(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"faketime_shm_{os.getpid()}",
        f"sem.faketime_sem_{os.getpid()}",
        "of somebody else",
    }
