"""A data directory at a running broker, read over HTTP: a `Disk` for the broker's own readers.

The broker serves bytes of its files as they are on the disk, as far as they are durable. Frames are
found and verified here, which reveals anything a proxy or a cable did to them. No shared disk is
needed: every worker asks the broker for the range it works on.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import httpx
import msgspec
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from qmq_broker.errors import DiskError
from qmq_broker.storage.files.disk_port import DiskFile
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.operations import KeepRequest
from qmq_client.wire.requests import ErrorAnswer, decode_json
from qmq_pipeline.errors import SourceError, UnreachableError
from qmq_pipeline.places.disks import ReadDisk, ReadFile

#: One request while a file is read from front to back; the broker gives no more in one answer.
AHEAD_BYTES: Final = 8 * 1024 * 1024
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
_TRIES: Final = 4
_WAIT_S_MAX: Final = 5.0
#: Statuses after which another try may succeed.
_AGAIN: Final = frozenset({429, 502, 503, 504})
_DENIED: Final = frozenset({401, 403})


class _AgainError(Exception):
    """Not now; perhaps in a moment."""


class RemoteDisk(ReadDisk):
    """The files of the broker at `address`. One thread at a time; connections stay open."""

    gives_durable_alone: ClassVar[bool] = True

    def __init__(self, address: BrokerAddress) -> None:
        """Raises `ConfigurationError` for bad certificates, `SourceError` for a bad address."""
        self._url = address.url.rstrip("/")
        try:
            self._client = httpx.Client(
                base_url=self._url,
                headers=address.headers(),
                timeout=_TIMEOUT,
                verify=address.ssl_context(),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise _unusable(self._url, str(error)) from error

    def open(self, path: str, *, is_new: bool = False) -> DiskFile:
        return _RemoteFile(self, path)

    def names(self, directory: str) -> list[str]:
        answer = self._get("/v1/files", {"directory": directory})
        try:
            return sorted(str(name) for name in answer.json()["names"])
        except (ValueError, KeyError, TypeError) as error:
            raise _unusable(self._url, "what answers there is no broker of this version") from error

    def close(self) -> None:
        self._client.close()

    def read(self, path: str, first: int, count: int) -> bytes:
        """Bytes of one file."""
        return self._get("/v1/files/read", {"path": path, "first": first, "count": count}).content

    def keep(self, request: KeepRequest) -> dict[str, Any] | None:
        """Tell the broker how far its logs are kept elsewhere; returns the keeper as it then is.

        None from a broker that does not know keepers. Raises `SourceError` if it refuses.
        """
        answer = self._try("POST", "/v1/keepers/keep", json=msgspec.to_builtins(request))
        if answer.status_code == httpx.codes.OK:
            kept: dict[str, Any] = answer.json()
            return kept
        refused = _refusal(answer)
        if refused is None:
            raise _unusable(self._url, f"status {answer.status_code} for a keeper")
        if refused.code == "not_found":
            return None
        remedy = refused.remedy or "What was committed stays; try again"
        said = refused.message.removesuffix(remedy).rstrip(". ")
        raise SourceError(
            source=self._url,
            reason=f"retention does not wait for {request.name}: {said}",
            remedy=remedy,
        )

    def _get(self, route: str, parameters: dict[str, Any]) -> httpx.Response:
        answer = self._try("GET", route, params=parameters)
        if answer.status_code == httpx.codes.NOT_FOUND and route.endswith("/read"):
            raise DiskError(operation="read", path=str(parameters["path"]), reason="it is gone")
        if answer.status_code != httpx.codes.OK:
            raise _unusable(self._url, f"status {answer.status_code} for {route}")
        return answer

    def _try(self, method: str, route: str, **request: Any) -> httpx.Response:
        tries = Retrying(
            retry=retry_if_exception_type(_AgainError),
            stop=stop_after_attempt(_TRIES),
            wait=wait_random_exponential(multiplier=0.1, max=_WAIT_S_MAX),
        )
        try:
            return tries(self._try_once, method, route, **request)
        except RetryError as error:
            reason = error.last_attempt.exception()
            raise UnreachableError(
                source=self._url,
                reason=f"the broker does not answer: {reason}",
                remedy="See whether it runs there (`qmq doctor --broker URL`), and try again",
            ) from error

    def _try_once(self, method: str, route: str, **request: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, route, **request)
        except httpx.UnsupportedProtocol as error:
            raise _unusable(self._url, str(error)) from error
        except httpx.HTTPError as error:
            raise _AgainError(str(error) or type(error).__name__) from error
        if answer.status_code in _AGAIN:
            raise _AgainError(f"status {answer.status_code}")
        if answer.status_code in _DENIED:
            raise SourceError(
                source=self._url,
                reason=f"the broker refuses this token (status {answer.status_code})",
                remedy="Give one that may consume all subjects as --token-file or QMQ_BROKER_TOKEN",
            )
        return answer


class _RemoteFile(ReadFile):
    """One file; reads ahead as long as it is read from front to back."""

    def __init__(self, disk: RemoteDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._block = b""
        self._first = 0

    def read(self, position: int, count: int) -> bytes:
        begin = position - self._first
        if begin >= 0 and begin + count <= len(self._block):
            return self._block[begin : begin + count]
        is_in_order = 0 <= begin <= len(self._block) and self._block
        wanted = min(max(count, AHEAD_BYTES if is_in_order else count), AHEAD_BYTES)
        self._first = position
        self._block = self._disk.read(self._path, position, wanted)
        while len(self._block) == wanted < count:  # a frame longer than one answer
            rest = min(count - wanted, AHEAD_BYTES)
            more = self._disk.read(self._path, position + wanted, rest)
            self._block += more
            wanted += rest
            if len(more) < rest:
                break
        return self._block[:count]

    def close(self) -> None:
        """Drop what was read ahead; the connection belongs to the disk."""
        self._block = b""

    def length(self) -> int:
        """For small files only: the file is read for it."""
        self._first = 0
        self._block = self._disk.read(self._path, 0, AHEAD_BYTES)
        return len(self._block)


def _refusal(answer: httpx.Response) -> ErrorAnswer | None:
    """What a broker says in a refusal; None if it is no broker's answer."""
    try:
        return decode_json(answer.content, ErrorAnswer)
    except ProtocolError:
        return None


def _unusable(url: str, reason: str) -> SourceError:
    return SourceError(
        source=url, reason=reason, remedy="Give the address of a broker, like http://host:9470"
    )
