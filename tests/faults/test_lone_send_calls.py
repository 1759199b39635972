"""How many system calls a lone durable send costs the broker, locks between its threads not counted."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from qmq_broker.face.exit_codes import ExitCode
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import MessageIds
from qmq_client.wire.record import Record, encode_record
from tests.faults.store_life import StoreProcess
from tests.faults.strace import counted, counts
from tests.kit.broker_process import SERVE

SENDS = 400
#: Of one send.
MOST = {
    "pwritev2": 1.1,  # the frame
    "fdatasync": 1.1,
    "fallocate": 1.1,  # whether the sync counts
    "newfstatat": 2.1,  # of the lock file and the segment
    "read": 2.1,  # the request; the word from the writer
    "write": 2.1,  # the word to the loop; the answer
    "epoll_pwait": 2.1,
}
ALL_MOST = 11.5
#: What the broker does by time, per second: turns of the store, of the loop, and of the key index.
BY_TIME = {"newfstatat": 250, "epoll_pwait": 100}
ALL_BY_TIME = 800


def _life(folder: Path, sends: int) -> tuple[Counter[str], float]:
    """The system calls of a broker's life with so many sends, and how long these took."""
    folder.mkdir()
    (folder / "data").mkdir()
    trace, ids = folder / "trace", MessageIds(5)
    with StoreProcess(folder / "data", under=counted(trace), command=SERVE) as broker:
        transport = HttpTransport(broker.url)
        began_s = time.monotonic()
        for _ in range(sends):
            record = Record(
                message_id=ids.next_id(), subject="orders", born_at_ms=1, body=bytes(100)
            )
            transport.send(build_message_frame({"orders": [encode_record(record)]}))
        took_s = time.monotonic() - began_s
        transport.close()
        assert broker.stop() == ExitCode.OK
    return counts(trace), took_s


def test_a_lone_send_costs_few_system_calls(tmp_path: Path) -> None:
    calls, took_s = _life(tmp_path / "many", 100 + SENDS)
    few_calls, few_s = _life(tmp_path / "few", 100)
    calls.subtract(few_calls)
    each_s = max(0.0, took_s - few_s) / SENDS
    each = {call: count / SENDS for call, count in calls.most_common() if count > 0}
    print(f"{1000 * each_s:.1f} ms each", {call: round(count, 2) for call, count in each.items()})
    most = {call: count + BY_TIME.get(call, 0) * each_s for call, count in MOST.items()}
    assert each["fdatasync"] >= 1
    assert {call: each[call] for call in most if each.get(call, 0) > most[call]} == {}
    assert sum(each.values()) <= ALL_MOST + ALL_BY_TIME * each_s
