"""SIGKILL of a real process on a real disk: everything it said was durable is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.wire.message_id import MessageIds, split_message_id
from tests.crash.enumeration import SEED
from tests.crash.world import OPTIONS, make_frame, records_of
from tests.kit.clock import FakeClock

ROUNDS = 4


def write_until_killed(root: str, instance: int) -> None:
    """Send messages; say each counter only after its sync."""
    store = Store.open(OsDisk(root), FakeClock(), OPTIONS)
    ids = MessageIds(instance)
    rng = random.Random(instance)
    while True:
        frames = [
            make_frame(ids, {"orders": [rng.randrange(300)] * 2})
            for _ in range(rng.randrange(1, 4))
        ]
        store.append(frames)
        store.commit_and_step()
        counters = [split_message_id(one)[1] for frame in frames for one in frame.message_ids()]
        os.write(1, b"".join(b"%d\n" % counter for counter in counters))


def killed_writer(root: Path, instance: int, lines: int) -> list[int]:
    """Run a writer, kill it in full flight, and return what it acknowledged."""
    program = (
        "import sys; from tests.crash.test_killed_process import write_until_killed\n"
        "write_until_killed(sys.argv[1], int(sys.argv[2]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(root), str(instance)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    acknowledged = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    rest, error = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, error.decode()
    # The last line may have been cut by the kill.
    whole = [line for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]
    return [int(line) for line in (*acknowledged, *whole)]


def test_B3_a_killed_process_leaves_everything_it_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    acknowledged: list[tuple[int, int]] = []
    for instance in range(1, ROUNDS + 1):
        counters = killed_writer(tmp_path, instance, rng.randrange(20, 200))
        acknowledged += [(instance, counter) for counter in counters]
        store = Store.open(OsDisk(str(tmp_path)), FakeClock(), OPTIONS)
        found = [split_message_id(record[4:20]) for record in records_of(store, "orders")]
        assert len(found) == len(set(found))
        in_order = [one for one in found if one in set(acknowledged)]
        assert in_order == acknowledged
        assert store.epoch == instance * 2
        store.close()
