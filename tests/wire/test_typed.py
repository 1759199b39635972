"""Decoding by type: threads that meet at the first use of a type, and types without a hash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from qmq_client.wire.typed import json_as, msgpack_as

ROOT = Path(__file__).resolve().parents[2]
#: Enough that without the lock the process died in each of the runs that were tried.
FIRST_USES = 2_000
#: A process of its own, for what it shows is that the process lives.
PROGRAM = """
import sys, threading
import msgspec
from typing import Annotated, Optional
from qmq_client.wire.typed import json_as, msgpack_as

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
    value = {decode}(data, kind)
    assert (value.count, value.names, value.reason) == (1, ["a"], "b")

data = {encode}({{"count": 1, "names": ["a"], "reason": "b"}})
for _ in range({first_uses}):
    together, kind = threading.Barrier(THREADS), fresh()
    threads = [threading.Thread(target=meet, args=(kind, together)) for _ in range(THREADS)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print("alive")
"""


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_threads_that_decode_a_type_for_the_first_time_at_once_live(encoding: str) -> None:
    program = PROGRAM.format(
        decode=f"{encoding}_as", encode=f"msgspec.{encoding}.encode", first_uses=FIRST_USES
    )
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_type_without_a_hash_and_one_that_cannot_be_decoded() -> None:
    kind: Any = Annotated[int, ["a note of the application"]]
    with pytest.raises(TypeError):
        hash(kind)
    assert json_as(b"3", kind) == 3
    with pytest.raises(msgspec.ValidationError):
        msgpack_as(b"\x01", str)
    with pytest.raises(TypeError):
        json_as(b"3", 17)
