"""What a power cut leaves of a folder: the files that were synced, under names that their folders were synced with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qmq_pipeline.work.worker import do_piece
from qmq_pipeline.work.workers import LocalWorkers


class Here(LocalWorkers):
    """Work is done in this process, where a test sees what is synced."""

    def run(self, function: str, pieces: Sequence[dict[str, Any]]) -> list[Any]:
        return [json.loads(json.dumps(do_piece(function, one))) for one in pieces]


class Synced:
    """Notes what is synced from now on; everything else counts as lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: Folder → names it was synced with.
        self._names: dict[str, set[str]] = {}
        #: Number of a file, whatever its name → what it held when it was synced.
        self._contents: dict[int, bytes] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._on_sync)

    def _on_sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self._names[path] = set(os.listdir(path))
        else:
            self._contents[os.fstat(descriptor).st_ino] = Path(path).read_bytes()

    def left(self, folder: Path, into: Path) -> None:
        """Put down elsewhere what is left of a folder; a file that was never synced is empty."""
        into.mkdir(parents=True)
        for name in self._names.get(str(folder), ()):
            one = folder / name
            if one.is_dir():
                self.left(one, into / name)
            elif one.exists():
                (into / name).write_bytes(self._contents.get(one.stat().st_ino, b""))
