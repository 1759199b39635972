"""Blocks of a frame's size come and go without a fault for each of their pages."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Frames that are made, copied and freed; each has 750 pages.
WORK = """
import resource
from qmq_client.wire.blocks import learn_block_size
learn_block_size()


def round():
    frame = b"x" * 3_000_000
    return b"".join((frame, b"y"))

round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_frames_come_and_go_without_faults() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, check=True, text=True)
    assert int(done.stdout) < 750
