"""A real broker as a process of its own, for tests that speak to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tests.kit.waiting import wait_for
from tests.services.private import free_port

READY_S_MAX = 60.0
_END_S_MAX = 60.0


class BrokerProcess:
    """`python -m qmq_broker serve` on a free port; may be killed and started again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = data.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "qmq_broker", "serve", "--data", str(self.data)]
        command += ["--listen", f"127.0.0.1:{self.port}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        self._wait_until_ready()

    def kill(self) -> None:
        """SIGKILL, as a power cut for the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(_END_S_MAX)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S_MAX)
            except subprocess.TimeoutExpired:
                self.kill()

    def _wait_until_ready(self) -> None:
        wait_for(self._is_ready, "the broker is not ready", within_s=READY_S_MAX)

    def _is_ready(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise AssertionError(f"the broker ended at once:\n{self.log.read_text()}")
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False
