"""What the broker process does to its files: all of it through the disk port, and each call may fail."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.message_id import MessageIds
from tests.crash.enumeration import SEED
from tests.faults.store_life import Sent, StoreProcess, check_survivors, live
from tests.faults.strace import changes, failing, traced

#: What the scripted life must have done, so that the comparison is not one of nothing with nothing.
SEEN = {"make", "write", "sync", "allocate", "truncate", "rename", "unlink", "make directory"}


def _lived(tmp_path: Path, *more: str) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """What the operating system was asked for, and what the port was, in two lives.

    The second one, short, finds the mark of a clean stop and takes it away.
    """
    data = tmp_path / "data"
    data.mkdir()
    seen: Counter[tuple[str, str]] = Counter()
    asked: Counter[tuple[str, str]] = Counter()
    sent = Sent()
    for life in range(2):
        record, trace = tmp_path / f"record{life}", tmp_path / f"trace{life}"
        there = {("make directory", path.name) for path in data.iterdir() if path.is_dir()}
        with StoreProcess(data, "--record", str(record), *more, under=traced(trace)) as broker:
            if not life:
                transport = HttpTransport(broker.url)
                sent = live(transport, sends=80, ids=MessageIds(3))
                transport.close()
            assert broker.stop() == ExitCode.OK, broker.log
        seen += changes(trace, data)
        for line in record.read_text().splitlines():
            call, _, path = line.rpartition(" ")
            if (call, path) not in there:  # asked for to be sure, and refused
                asked[call, path] += 1
                if call == "make directory":
                    there.add((call, path))
    assert not sent.errors
    check_survivors(data, sent)
    return seen, asked


def test_B3_all_that_the_broker_does_to_its_files_goes_through_the_disk_port(
    tmp_path: Path,
) -> None:
    """Else the crash states that are made up from the port's calls would not be all there are."""
    seen, asked = _lived(tmp_path)
    assert {call for call, _ in seen} >= SEEN
    assert seen == asked, f"past the port: {seen - asked}; not seen: {asked - seen}"


def test_a_change_past_the_port_is_seen(tmp_path: Path) -> None:
    seen, asked = _lived(tmp_path, "--bypass")
    assert {call for call, _ in seen - asked} >= {"make", "sync"}
    assert not asked - seen


#: Calls that are made to fail, and up to which one by chance in a short life. In another kind of
#: Python the same calls have other names; all of them are asked for.
FAILING = {
    "pwritev,pwritev2": 150,
    "fdatasync": 60,
    "fsync": 25,
    "fallocate": 12,
    "ftruncate": 10,
    "/^rename": 10,
    "/^unlink": 3,
    "/^mkdir": 4,
    "pwrite64": 1,
}
ERRORS = ("EIO", "ENOSPC")
SENDS = 40
#: Calls of one kind, of one thread, in a whole life: beyond it a life is not as it was thought to be.
CALLS_MAX = 2_000
#: How a broker may end that was refused a call: at the start, while it served, or while it stopped.
ENDS = {ExitCode.OK, ExitCode.UNCLEAN, ExitCode.DIRECTORY, ExitCode.POISONED}


def _lived_with_a_failure(folder: Path, call: str, error: str, number: int) -> bool:
    """One life in which the n-th call fails; returns whether there were so many."""
    data, trace = folder / "data", folder / "trace"
    data.mkdir(parents=True)
    under = failing(trace, call, error, number)
    sent = Sent()
    broker = StoreProcess(data, under=under)
    try:
        if broker.starts():
            transport = HttpTransport(broker.url)
            sent = live(transport, sends=SENDS, ids=MessageIds(3))
            transport.close()
            code = broker.stop()
        else:
            code = broker.wait()
        log = broker.log
    finally:
        broker.clean_up()
    is_fired = "(INJECTED)" in trace.read_text()
    assert code in ENDS, log
    assert "Traceback" not in log
    assert is_fired or code == ExitCode.OK, log
    if code != ExitCode.OK:
        ends = (" poisoned ", " not_opened ", " not_closed ", " stop_not_marked ")
        assert any(end in log for end in ends)
    check_survivors(data, sent)
    return is_fired


@pytest.mark.timeout(0)
def test_B5_B6_whichever_call_fails_the_broker_ends_as_documented_and_loses_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every call of every kind before a release; else some of each, by chance, whose seed is told."""
    if request.config.getoption("--release"):
        for place, (call, error) in enumerate(itertools.product(FAILING, ERRORS)):
            for number in range(1, CALLS_MAX):
                if not _lived_with_a_failure(tmp_path / f"{place}-{number}", call, error, number):
                    break
        return
    rng = random.Random(SEED)
    fired = 0
    for place, (call, highest) in enumerate(FAILING.items()):
        number = rng.randint(1, highest)
        error = ERRORS[(SEED + place) % len(ERRORS)]
        print(f"{call} {number} {error}")
        fired += _lived_with_a_failure(tmp_path / str(place), call, error, number)
    assert fired >= len(FAILING) // 2
