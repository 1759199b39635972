"""How many system calls a lone durable send costs the broker, locks between its threads not counted."""

from __future__ import annotations

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
#: Of one send, with what the broker does by time meanwhile.
MOST = {
    "pwritev2": 1.1,  # the frame
    "fdatasync": 1.1,
    "fallocate": 1.1,  # whether the sync counts
    "newfstatat": 2.7,  # of the lock file and the segment; turns of the store
    "read": 2.1,  # the request; the word from the writer
    "write": 2.1,  # the word to the loop; the answer
    "epoll_pwait": 2.7,
}
#: All of them together.
ALL_MOST = 13.0


def _life(folder: Path, sends: int) -> Counter[str]:
    folder.mkdir()
    (folder / "data").mkdir()
    trace = folder / "trace"
    ids = MessageIds(5)
    with StoreProcess(folder / "data", under=counted(trace), command=SERVE) as broker:
        transport = HttpTransport(broker.url)
        for _ in range(sends):
            record = Record(
                message_id=ids.next_id(), subject="orders", born_at_ms=1, body=bytes(100)
            )
            transport.send(build_message_frame({"orders": [encode_record(record)]}))
        transport.close()
        assert broker.stop() == ExitCode.OK
    return counts(trace)


def test_a_lone_send_costs_few_system_calls(tmp_path: Path) -> None:
    calls = _life(tmp_path / "many", 100 + SENDS)
    calls.subtract(_life(tmp_path / "few", 100))
    each = {call: count / SENDS for call, count in calls.most_common() if count > 0}
    print({call: round(count, 2) for call, count in each.items()})
    assert each["fdatasync"] >= 1
    assert {call: each.get(call, 0) for call in MOST if each.get(call, 0) > MOST[call]} == {}
    assert sum(each.values()) <= ALL_MOST
