"""`qmq store`: looking after a data directory from outside the broker.

Exit codes, the same as of `qmq broker serve` where both have them: 0 done and nothing is wrong that
matters; 1 something derived is wrong, a start mends it; 2 usage; 3 the directory is in use, of another
version, or none; 4 accepted data is damaged; 5 the disk refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec

from qmq_broker.clock import SYSTEM_CLOCK
from qmq_broker.errors import CorruptionError, DiskError, NoRoomError, StoreError
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.storage.faults import Level
from qmq_broker.storage.verify import Verification

MENDED_AT_START: Final = 1
_DIRECTORY: Final = click.Path(exists=True, file_okay=False)


@click.group()
def store() -> None:
    """Verify, read, rebuild, back up and restore a data directory."""


@store.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--deep", "is_deep", is_flag=True, help="Verify the checksum of each record too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--workers", type=click.IntRange(1, 8), help="Processes; by default one for a core.")
def verify(directory: str, *, is_deep: bool, as_json: bool, workers: int | None) -> None:
    """Read and check every file of a stopped broker; changes nothing.

    Exit codes: 0 all is well, 1 derived files are wrong and made again by the next start, 3 in use or
    no data directory, 4 accepted data is damaged.
    """
    from qmq_broker.face.store_workers import runner, workers_here
    from qmq_broker.service.snapshot import decode_groups
    from qmq_broker.storage.disk import OsDisk
    from qmq_broker.storage.verify import verify_store

    with store_errors():
        found = verify_store(
            OsDisk(directory),
            SYSTEM_CLOCK,
            check_groups=lambda content: decode_groups(content, 0),
            is_deep=is_deep,
            run=runner(directory, workers or workers_here()),
        )
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        for line in _lines(found):
            click.echo(line)
    sys.exit(_exit_code(found))


def _lines(found: Verification) -> Iterator[str]:
    for fault in found.faults:
        yield fault.line()
    for log in found.logs:
        torn = f", {log.torn_bytes} bytes of a torn tail" if log.torn_bytes else ""
        yield (
            f"{log.log}: {log.frames} frames with {log.records} records, offsets "
            f"{log.first_offset} to {log.next_offset}, {log.segments} segments{torn}"
        )
    messages = sum(next_ - first for first, next_ in found.subjects.values())
    stop = "stopped in order" if found.is_clean else "not stopped in order"
    yield f"{len(found.subjects)} subjects, {messages} messages, {stop}, epoch {found.epoch}"
    verdict = {
        None: "all is well",
        Level.IGNORED: "all is well",
        Level.REBUILT: "derived files are wrong; the next start makes them again",
        Level.DAMAGED: "ACCEPTED DATA IS DAMAGED",
    }[found.worst]
    yield f"{verdict} ({found.duration_ms / 1000:.1f} s)"


def _exit_code(found: Verification) -> int:
    if found.worst is Level.DAMAGED:
        return ExitCode.CORRUPTION
    return MENDED_AT_START if found.worst is Level.REBUILT else ExitCode.OK


@contextmanager
def store_errors() -> Iterator[None]:
    """Foreseen errors as one line and their exit code."""
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
