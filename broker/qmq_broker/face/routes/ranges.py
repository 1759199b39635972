"""The routes by which the pipeline reads the log files of a running broker.

`GET /v1/files` lists the names in one of the folders below, `GET /v1/files/read` gives bytes of one
file. The reader finds and verifies frames itself, with the broker's code. The answers contain only
durable bytes of a log, so a reader never sees data that a power cut could remove.

Only logs, and the files that define where they begin and end, can be read here; no path leads
outside the data directory. Reads run in threads, a few at a time, so that they do not slow down
senders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.errors import BusyError, DiskError, NotFoundError
from qmq_broker.face.routes.queries import number
from qmq_broker.service.broker import Broker
from qmq_broker.storage.files import layout
from qmq_client.wire.errors import InvalidMessageError
from qmq_client.wire.requests import JSON_CONTENT_TYPE
from qmq_client.wire.shown import shorten

_Result = TypeVar("_Result")
#: Bytes of one answer: a few milliseconds of a disk, and one buffer in memory.
READ_BYTES_MAX: Final = 8 * 1024 * 1024
#: Simultaneous reads.
READS_MAX: Final = 4
#: Most reads that wait; further ones are refused as busy.
WAITING_MAX: Final = 32
_RETRY_AFTER_S: Final = 1.0
_BYTES_CONTENT_TYPE: Final = "application/octet-stream"
_LOGS: Final = (layout.COMMIT_LOG, layout.ACTION_LOG)
_SMALL_FILES: Final = frozenset({layout.FORMAT, layout.RETAINED, *layout.CHECKPOINTS})
_DIRECTORIES: Final = frozenset({layout.ROOT, layout.STATE, *_LOGS})


class FileRoutes:
    """Handlers of reads of the log files."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reads = asyncio.Semaphore(READS_MAX)
        self._waiting = 0

    async def names(self, request: Request) -> Response:
        """Names of the readable files in one folder."""
        directory = request.query_params.get("directory", layout.ROOT)
        if directory not in _DIRECTORIES:
            raise _not_readable("directory", directory)
        prefix = f"{directory}/" if directory else ""
        found = await self._in_thread(lambda: self._broker.disk.names(directory))
        names = [name for name in found if _is_readable(prefix + name)]
        return Response(msgspec.json.encode({"names": names}), media_type=JSON_CONTENT_TYPE)

    async def read(self, request: Request) -> Response:
        """Bytes of one file; fewer than asked for at its end, or where they are not durable yet."""
        path = request.query_params.get("path", "")
        if not _is_readable(path):
            raise _not_readable("path", path)
        first, count = number(request, "first"), number(request, "count")
        content = await self._in_thread(lambda: self._bytes(path, first, count))
        return Response(content, media_type=_BYTES_CONTENT_TYPE)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        if self._waiting >= WAITING_MAX:
            raise BusyError(
                f"{self._waiting} reads of files wait; allowed: {WAITING_MAX}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waiting += 1
        try:
            async with self._reads:
                return await asyncio.to_thread(work)
        finally:
            self._waiting -= 1

    def _bytes(self, path: str, first: int, count: int) -> bytes:
        durable = self._durable_bytes(path)
        count = count if durable is None else min(count, durable - first)
        if count <= 0:
            return b""
        try:
            file = self._broker.disk.open(path)
        except DiskError as error:
            raise NotFoundError(f"there is no file {path}: {error.reason}") from error
        try:
            return file.read(first, count)
        finally:
            file.close()

    def _durable_bytes(self, path: str) -> int | None:
        """How many bytes of a segment are durable; None for a file that is replaced as a whole."""
        log, _, name = path.partition("/")
        base = layout.parse_number(name)
        if log not in _LOGS or base is None:
            return None
        commit_log, action_log = self._broker.durable_offsets
        return (commit_log if log == layout.COMMIT_LOG else action_log) - base


def _is_readable(path: str) -> bool:
    log, _, name = path.partition("/")
    return path in _SMALL_FILES or (log in _LOGS and layout.parse_number(name) is not None)


def _not_readable(field: str, value: str) -> InvalidMessageError:
    return InvalidMessageError(
        field=field,
        limit="a folder or file of the logs",
        value=shorten(value),
        remedy="GET /v1/files lists what there is.",
    )
