"""`qmq store`: verifies, prints, rebuilds, backs up and restores a data directory.

Exit codes, shared with `qmq broker serve`: 0 done, nothing serious found; 1 a derived file is wrong,
and the next start repairs it; 2 bad usage; 3 the directory is in use, of another version, or no data
directory; 4 accepted data is damaged; 5 the disk failed or is full.

Several processes verify the segments of a large log, because CRC-32C and copying keep one core busy.
This process alone verifies a small log: starting another process takes longer than reading a few hundred megabytes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Final

import click
import msgspec

from qmq_broker.errors import CorruptionError, DiskError, NoRoomError, StoreError
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.faults import Level
from qmq_broker.storage.files.layout import COMMIT_LOG, FORMAT
from qmq_broker.storage.upkeep.backup import Backup
from qmq_broker.storage.upkeep.verify import Verification
from qmq_broker.storage.upkeep.verify_segment import (
    Run,
    SegmentOutcome,
    SegmentTask,
    verify_segment,
)
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.wire.shown import printable

MENDED_AT_START: Final = 1
#: The kinds of `dump`, listed here so that its module is loaded only when needed.
DUMPED: Final = (
    "actions",
    "checkpoint",
    "clean",
    "dispatch",
    "entries",
    "format",
    "frames",
    "ids",
    "keepers",
    "queues",
    "records",
    "retained",
    "schedule",
    "segments",
    "snapshot",
    "summaries",
    "waiting",
)
_DUMP_HELP: Final = (
    "Print the contents of the files of one KIND; the broker may be running.\n\n"
    f"KIND is one of {', '.join(DUMPED)}."
)
_DIRECTORY: Final = click.Path(exists=True, file_okay=False)


@click.group()
def store() -> None:
    """Verify, read, rebuild, back up and restore a data directory."""


@store.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--deep", "is_deep", is_flag=True, help="Verify the checksum of each record too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--workers", type=click.IntRange(1, 8), help="Processes; by default one per core.")
def verify(directory: str, *, is_deep: bool, as_json: bool, workers: int | None) -> None:
    """Read and check every file of a stopped broker; changes nothing.

    Exit codes: 0 all is well, 1 derived files are wrong and will be rebuilt by the next start, 3 in
    use or no data directory, 4 accepted data is damaged.
    """
    with store_errors():
        found = _verified(directory, is_deep=is_deep, workers=workers)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        for line in _lines(found):
            click.echo(line)
    sys.exit(_exit_code(found))


@store.command(help=_DUMP_HELP)
@click.argument("kind", metavar="KIND", type=click.Choice(DUMPED))
@click.argument("directory", type=_DIRECTORY)
@click.option("--subject", help="Only rows of this subject.")
@click.option(
    "--from",
    "first",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Offset in the log to begin at; for entries, the sequence.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 2**31),
    default=100,
    show_default=True,
    help="Maximum number of rows.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
def dump(
    kind: str, directory: str, *, subject: str | None, first: int, limit: int, as_json: bool
) -> None:
    """Print rows; the help of the command is `_DUMP_HELP`."""
    from qmq_broker.face.commands.store_dump import DumpQuestion
    from qmq_broker.face.commands.store_dump import dump as rows
    from qmq_broker.storage.files.disk import OsDisk

    question = DumpQuestion(subject=subject, first=first)
    with store_errors():
        for row in islice(rows(OsDisk(directory, is_read_only=True), kind, question), limit):
            if as_json:
                click.echo(msgspec.json.encode(row))
            else:
                click.echo("  ".join(f"{name}={_text(value)}" for name, value in row.items()))


@store.command()
@click.argument("directory", type=_DIRECTORY)
@click.argument("what", type=click.Choice(["queues", "all"]), default="queues")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def rebuild(directory: str, what: str, *, as_json: bool) -> None:
    """Rebuild derived files of a stopped broker from the logs: the consume queues, or all.

    `all` also removes key index, summaries and the journal of ids; the broker rebuilds them.
    """
    from qmq_broker.storage.files.disk import OsDisk
    from qmq_broker.storage.upkeep.rebuild import rebuild_store

    with store_errors():
        done = rebuild_store(OsDisk(directory), SYSTEM_CLOCK, with_index=what == "all")
    if as_json:
        click.echo(msgspec.json.encode(done))
        return
    click.echo(
        f"{done.entries} entries of {done.subjects} subjects, up to offset {done.indexed_offset} "
        f"({done.duration_ms / 1000:.1f} s)"
    )
    if what == "all":
        click.echo(
            f"{done.index_files} files of the key index, {done.summaries} summaries and "
            f"{done.id_files} files of ids removed"
        )


@store.command()
@click.argument("directory", type=_DIRECTORY)
@click.argument("target", type=click.Path(file_okay=False))
@click.option(
    "--copy", "no_links", is_flag=True, help="Copy sealed segments instead of linking them."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def backup(directory: str, target: str, *, no_links: bool, as_json: bool) -> None:
    """Copy a data directory into the empty directory TARGET; the broker may be running.

    The copy holds all messages acknowledged before the call, and a broker can open it. On the same
    file system sealed segments are linked, not copied: they take no room, but are lost with the
    same disk.
    """
    from qmq_broker.storage.files.disk import OsDisk, link_file
    from qmq_broker.storage.upkeep.backup import back_up

    with store_errors(), _reporting_unfinished(target):
        _refuse_inside(directory, target)
        source, copy = OsDisk(directory, is_read_only=True), OsDisk(target)
        made = back_up(
            source,
            copy,
            SYSTEM_CLOCK,
            link=lambda path: not no_links and link_file(source, path, copy),
        )
    _say_copied(made, as_json)


@store.command()
@click.argument("directory", type=_DIRECTORY)
@click.argument("target", type=click.Path(file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def restore(directory: str, target: str, *, as_json: bool) -> None:
    """Verify the backup DIRECTORY, then copy it into the empty directory TARGET.

    The backup is not changed. A damaged or unfinished one is refused (exit code 4).
    """
    from qmq_broker.storage.files.disk import OsDisk
    from qmq_broker.storage.upkeep.backup import back_up

    with store_errors(), _reporting_unfinished(target):
        _refuse_inside(directory, target)
        found = _verified(directory, is_deep=False, workers=None)
        if found.worst is Level.DAMAGED:
            for line in _lines(found):
                click.echo(line, err=True)
            sys.exit(ExitCode.CORRUPTION)
        source = OsDisk(directory, is_read_only=True)
        made = back_up(source, OsDisk(target), SYSTEM_CLOCK, link=lambda path: False)
    _say_copied(made, as_json)


def _refuse_inside(directory: str, target: str) -> None:
    """Refuse a target inside the directory: it would be lost with it, and copied into each later copy."""
    inner, outer = Path(target).resolve(), Path(directory).resolve()
    if inner != outer and inner.is_relative_to(outer):
        raise StoreError(f"{target} is inside {directory}: give a directory outside of it.")


@contextmanager
def _reporting_unfinished(target: str) -> Iterator[None]:
    """Report the unfinished copy that an error leaves behind; a complete copy has FORMAT."""
    try:
        yield
    except StoreError:
        if Path(target, COMMIT_LOG).exists() and not Path(target, FORMAT).exists():
            click.echo(
                f"The copy in {target} is unfinished: remove it before you try again.", err=True
            )
        raise


def _say_copied(made: Backup, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(made))
        return
    click.echo(
        f"commit log from offset {made.first_offset} to {made.next_offset}: {made.linked_segments} "
        f"segments linked, {made.copied_bytes} bytes copied ({made.duration_ms / 1000:.1f} s)"
    )


def _text(value: object) -> str:
    return printable(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _verified(directory: str, *, is_deep: bool, workers: int | None) -> Verification:
    from qmq_broker.face.commands.store import runner, workers_here
    from qmq_broker.service.delivery.snapshot import check_groups
    from qmq_broker.storage.files.disk import OsDisk
    from qmq_broker.storage.upkeep.verify import verify_store

    return verify_store(
        OsDisk(directory, is_read_only=True),
        SYSTEM_CLOCK,
        check_groups=check_groups,
        is_deep=is_deep,
        run=runner(directory, workers or workers_here()),
    )


def _lines(found: Verification) -> Iterator[str]:
    for fault in found.faults:
        yield fault.line()
    for log in found.logs:
        lost = f", {log.lost} lost and in quarantine" if log.lost else ""
        torn = f", {log.torn_bytes} bytes of a torn tail" if log.torn_bytes else ""
        yield (
            f"{log.log}: {log.frames} frames with {log.records} records, offsets "
            f"{log.first_offset} to {log.next_offset}, {log.segments} segments{lost}{torn}"
        )
    messages = sum(next_ - first for first, next_ in found.subjects.values())
    stop = "stopped in order" if found.is_clean else "not stopped in order"
    yield (
        f"{len(found.subjects)} subjects, {messages} messages, {stop}, epoch {found.epoch} (one more with "
        "each start)"
    )
    verdict = {
        None: "all is well",
        Level.IGNORED: "all is well",
        Level.REBUILT: "derived files are wrong; the next start rebuilds them",
        Level.DAMAGED: "ACCEPTED DATA IS DAMAGED",
    }[found.worst]
    yield f"{verdict} ({found.duration_ms / 1000:.1f} s)"


def _exit_code(found: Verification) -> int:
    if found.worst is Level.DAMAGED:
        return ExitCode.CORRUPTION
    return MENDED_AT_START if found.worst is Level.REBUILT else ExitCode.OK


@contextmanager
def store_errors() -> Iterator[None]:
    """Print an expected error as one line and exit with its code."""
    try:
        yield
    except StoreError as error:
        click.echo(f"Error: {' '.join(str(error).split())}", err=True)
        sys.exit(_code_of(error))


def _code_of(error: StoreError) -> int:
    if isinstance(error, CorruptionError):
        return ExitCode.CORRUPTION
    if isinstance(error, DiskError | NoRoomError):
        return ExitCode.POISONED
    return ExitCode.DIRECTORY


#: A log with fewer bytes is verified by this process alone.
ALONE_BYTES_MAX: Final = 256 * 1024 * 1024
WORKERS_MAX: Final = 8


def runner(directory: str, workers: int) -> Run:
    """A function that verifies segments of the data directory, in up to `workers` processes."""

    def run(tasks: list[SegmentTask]) -> list[SegmentOutcome]:
        segment_bytes = max((task.format.segment_bytes for task in tasks), default=0)
        count = min(workers, len(tasks), WORKERS_MAX)
        if count < 2 or segment_bytes * len(tasks) < ALONE_BYTES_MAX:
            disk = OsDisk(directory, is_read_only=True)
            try:
                return [verify_segment(disk, task) for task in tasks]
            finally:
                disk.close()
        # Spawned processes: a fork would copy this process with its locks, but without its threads.
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, fresh, initializer=end_with_parent) as pool:
            return list(pool.map(_verify, [(directory, task) for task in tasks]))

    return run


def end_with_parent() -> None:
    """Make this process of a pool end when its parent has ended, even if the parent was killed.

    Otherwise it would wait for work forever: its siblings keep the other end of the pipe open.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)  # even in the middle of work: no process reads its results any more

    Thread(target=watch, name="parent", daemon=True).start()


def workers_here() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _verify(work: tuple[str, SegmentTask]) -> SegmentOutcome:
    directory, task = work
    disk = OsDisk(directory, is_read_only=True)
    try:
        return verify_segment(disk, task)
    finally:
        disk.close()
