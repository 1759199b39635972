"""A disk that takes no writes any more: what is on it can be looked at, verified and saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from tests.faults.store_disk import read_only, small_disk
from tests.faults.store_life import Sent, StoreProcess, check_survivors, frame_of
from tests.kit.broker_process import BrokerProcess

FRAMES = 10


def _store(*arguments: str | Path) -> tuple[int, str]:
    """`qmq store` as a process, which keeps no file of the disk open; its exit code and output."""
    command = [sys.executable, "-m", "qmq_client", "store", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_X3_a_killed_brokers_directory_is_verified_read_and_saved_from_a_read_only_disk(
    tmp_path: Path,
) -> None:
    sent, ids = Sent(), MessageIds(5)
    with small_disk("tmpfs", tmp_path) as place:
        data, saved = place / "data", tmp_path / "saved"
        with StoreProcess(data, "--reserve-bytes", "0") as broker:
            transport = HttpTransport(broker.url)
            for _ in range(FRAMES):
                assert sent.send(transport, frame_of(ids, 900))
            transport.close()
            broker.kill()
        with read_only(place):
            code, output = _store("verify", data)
            assert code == ExitCode.OK, output
            assert f"{FRAMES} frames" in output
            assert len(_store("dump", "frames", data)[1].splitlines()) >= FRAMES
            assert _store("restore", data, saved)[0] == ExitCode.OK
            assert _store("backup", data, tmp_path / "copy")[0] == ExitCode.OK
            # A broker has to write: it says so, and is no reason for anybody to look for damage.
            refused = BrokerProcess(data)
            assert refused.run_to_end() == ExitCode.DIRECTORY
            assert "Read-only file system" in refused.log
    check_survivors(saved, sent)
    check_survivors(tmp_path / "copy", sent)
