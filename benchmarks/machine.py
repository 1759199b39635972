"""What the figures were taken on: processor, kernel, disk, load, and the code's version.

Reads Linux's `/proc` and `/sys`; elsewhere fields say "unknown" and the benchmarks still run.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.measure import percentile
from benchmarks.result import Machine
from qmq_client.cli import codec
from qmq_client.wire.checksum import CRC32C_MADE_BY

ROOT: Final = Path(__file__).resolve().parents[1]
#: File systems that live in memory: what is written there says nothing about durability.
MEMORY_FILE_SYSTEMS: Final = {"tmpfs", "ramfs", "zram"}
FLUSHES: Final = 50
#: Often enough to lose little of a process, seldom enough not to be felt.
_LOOK_S: Final = 5.0
#: Of prctl(2).
_SET_CHILD_SUBREAPER: Final = 36


class NoDiskError(Exception):
    """There is no directory on a disk to measure in; give one by `--directory`."""


def describe_machine(directory: Path) -> Machine:
    """The machine, seen from the directory that the benchmarks write to."""
    return Machine(
        processor=processor_name(),
        processor_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()} with CRC-32C by "
        f"{CRC32C_MADE_BY}, codec: {codec()}",
        disk=describe_disk(directory),
        flush_ms=flush_ms(directory),
    )


def processor_name() -> str:
    """The processor's model, as its maker calls it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.machine() or "unknown"


def find_directory(wanted: Path | None) -> Path:
    """The folder for temporary directories: as wanted, or one that is surely on a disk."""
    if wanted is not None:
        candidates = [wanted]
    else:
        candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT / ".cache"]
    for candidate in candidates:
        if candidate.is_dir() and file_system(candidate)[0] not in MEMORY_FILE_SYSTEMS:
            return candidate
    raise NoDiskError(
        f"{', '.join(map(str, candidates))}: missing or in memory, so nothing there is durable. "
        "Name a directory on a disk: --directory DIR"
    )


def file_system(directory: Path) -> tuple[str, str]:
    """Kind of the file system and its device's number (major:minor)."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown", ""
    best = ("", "unknown", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        device, _, mount_point = left.split()[2:5]
        is_above = directory.resolve().is_relative_to(mount_point)
        if is_above and len(mount_point) >= len(best[0]):
            best = (mount_point, right.split()[0], device)
    return best[1], best[2]


def describe_disk(directory: Path) -> str:
    """File system and device, in words."""
    kind, device = file_system(directory)
    queue = Path("/sys/dev/block") / device / "queue"
    if not queue.is_dir():  # a partition: the queue belongs to the whole disk
        queue = queue.parent.resolve().parent / "queue"
    try:
        is_rotating = (queue / "rotational").read_text().strip() == "1"
        cache = (queue / "write_cache").read_text().strip()
    except OSError:
        return f"{kind}, device unknown"
    name = queue.resolve().parent.name
    if name.startswith(("vd", "xvd")):  # a virtual disk calls itself rotating whatever is below
        return f"{kind} on a virtual disk, write cache: {cache}"
    return f"{kind} on a {'rotating' if is_rotating else 'solid-state'} disk, write cache: {cache}"


def flush_ms(directory: Path) -> float:
    """Median of 4-KiB appends to a new file, each followed by fdatasync."""
    times_ms = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(FLUSHES):
            started_ns = time.perf_counter_ns()
            os.write(file.fileno(), bytes(4096))
            os.fdatasync(file.fileno())
            times_ms.append((time.perf_counter_ns() - started_ns) / 1e6)
    return round(percentile(times_ms, 0.5), 3)


class Neighbours:
    """What everything else on the machine took of its processors while this was entered.

    Ours is what this process used, and what all processes did that come from it: those that have ended,
    and those that still run, as Spark's JVM does to the end. The times of some are lost when they end: the parent
    of Spark's workers does not wait for them. So a thread adds up what is new from time to time, and
    what was counted stays counted.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="neighbours", daemon=True)
        self._our_s = 0.0
        self._seen_s = our_processor_seconds()
        self._busy_s, self._all_s = processor_seconds()

    def __enter__(self) -> Neighbours:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def share(self) -> float:
        """Between 0 and 1; 0 where the system does not tell. Requires: it was left."""
        busy_s, all_s = processor_seconds()
        if all_s <= self._all_s:
            return 0.0
        others_s = busy_s - self._busy_s - self._our_s
        return round(max(0.0, others_s) / (all_s - self._all_s), 3)

    def _follow(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        seen_s = our_processor_seconds()
        self._our_s += max(0.0, seen_s - self._seen_s)
        self._seen_s = seen_s


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as that of Spark's workers may.

    They are not waited for, so they keep their times until this process ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


def processor_seconds() -> tuple[float, float]:
    """Seconds of all processors since the start: not idle, and all; stolen ones are not idle."""
    try:
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return 0.0, 0.0
    ticks = [int(field) for field in first.split()[1:9]]  # user … steal; guests are in user
    idle = ticks[3] + ticks[4]
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / per_s, sum(ticks) / per_s


def our_processor_seconds() -> float:
    """Seconds of this process and of all that come from it, running or ended."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended in between, and its parent has its time
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(
            map(int, fields[11:15])
        )  # its own and its ended children's, user and system
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    if found[0] not in ticks:  # a system without /proc
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system
    return sum(ticks.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")


def load_average() -> float:
    """Load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def code_version() -> str:
    """Version of the distribution, with the commit and a mark when files were changed."""
    version = f"qmq {metadata.version('qmq')}"
    try:
        commit = git("rev-parse", "--short", "HEAD")
        is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return version
    return f"{version} at {commit}{' with changes' if is_changed else ''}"


def git(*arguments: str) -> str:
    """What git says about this repository."""
    line = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()
