"""Decoding by type: threads that meet at the first use of a type, and types without a hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from qmq_client.typed import json_as

ROOT = Path(__file__).resolve().parents[2]
#: Enough that without the lock the process died in each of the runs that were tried.
FIRST_USES = 2_000
#: A process of its own, for what it shows is that the process lives.
PROGRAM = """
import sys, threading
import msgspec
from typing import Annotated, Optional
from qmq_client.typed import json_as

sys.setswitchinterval(1e-6)
THREADS = 6

def fresh():
    class Answer(msgspec.Struct, kw_only=True):
        count: int
        names: list[str] = []
        reason: Optional[Annotated[str, msgspec.Meta(max_length=9)]] = None
    return Answer

def meet(kind, together):
    together.wait()
    value = json_as(data, kind)
    assert (value.count, value.names, value.reason) == (1, ["a"], "b")

data = msgspec.json.encode({{"count": 1, "names": ["a"], "reason": "b"}})
for _ in range({first_uses}):
    together, kind = threading.Barrier(THREADS), fresh()
    threads = [threading.Thread(target=meet, args=(kind, together)) for _ in range(THREADS)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print("alive")
"""


def test_threads_that_decode_a_type_for_the_first_time_at_once_live() -> None:
    done = run(PROGRAM.format(first_uses=FIRST_USES))
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


#: msgspec's own reader of annotations is Python: whether it is called can be seen.
READERS = """
import sys, msgspec
from qmq_client.wire import deliveries, requests
kinds = [requests.SettleRequest, requests.SettleAnswer, requests.PullRequest, requests.SendAnswer]
kinds += [requests.ErrorAnswer, deliveries.DeliveriesHead, {further}]
called = []
sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
for kind in kinds:
    msgspec.json.Decoder(kind)
sys.setprofile(None)
print("get_class_annotations" in called)
"""


def test_the_types_of_the_wire_are_read_when_they_are_imported() -> None:
    assert run(READERS.format(further="")).stdout == "False\n"
    fresh = "msgspec.defstruct('Fresh', [('count', int)])"
    assert run(READERS.format(further=fresh)).stdout == "True\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", program]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_a_type_without_a_hash_and_one_that_cannot_be_decoded() -> None:
    kind: Any = Annotated[int, ["a note of the application"]]
    with pytest.raises(TypeError):
        hash(kind)
    assert json_as(b"3", kind) == 3
    with pytest.raises(msgspec.ValidationError):
        json_as(b"1", str)
    with pytest.raises(TypeError):
        json_as(b"3", 17)
