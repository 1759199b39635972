"""A disk that takes no writes any more: what is on it can be looked at, verified and saved.

One that begins so under a broker ends it, and nothing is lost.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from tests.faults.store_disk import check_and_mount_again, read_only, small_disk, stop_writes
from tests.faults.store_judged import judged
from tests.faults.store_life import Sent, StoreProcess, check_survivors, frame_of
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess

FRAMES = 10
ERRORS_OF_THE_DISK = 3
ERRORS_BEFORE_A_RELEASE = 60
#: What ext4 says while it gives up and afterwards.
REASONS = ("Input/output error", "Read-only file system")


def _store(*arguments: str | Path) -> tuple[int, str]:
    """`qmq store` as a process, which keeps no file of the disk open; its exit code and output."""
    done = warm.run(["qmq_client", "store", *map(str, arguments)], timeout=60)
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


@pytest.mark.timeout(0)
def test_B1_B3_B5_B7_a_disk_that_goes_read_only_under_load_ends_the_broker_and_loses_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_release = request.config.getoption("--release")
    errors = ERRORS_BEFORE_A_RELEASE if is_release else ERRORS_OF_THE_DISK
    with small_disk("ext4", tmp_path) as place:
        data = place / "data"

        def strike(broker: StoreProcess) -> None:
            stop_writes(place)
            assert broker.wait() == ExitCode.POISONED, broker.log
            assert any(reason in broker.log for reason in REASONS), broker.log
            assert "Traceback" not in broker.log

        def mend(_: random.Random) -> None:
            refused = BrokerProcess(data)
            assert refused.run_to_end() == ExitCode.DIRECTORY
            assert "Read-only file system" in refused.log
            check_and_mount_again(place, tmp_path)

        verdict = judged(data, errors, kind="crash", after_each=mend, end=strike)
    assert verdict.ok, verdict
