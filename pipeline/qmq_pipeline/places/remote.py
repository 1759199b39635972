"""A read-only `Disk` for the data directory of a running broker, read over HTTP.

The broker serves the durable bytes of its files unchanged. Frames are found and verified here,
which reveals damage in transit. No shared disk is needed: every worker requests its range from the
broker.

It waits for an unreachable broker (`outage.py`). An interrupted answer is continued after its last
byte: the bytes of a segment are durable and never change, even after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, ClassVar, Final, TypeVar

import httpx
import msgspec

from qmq_broker.errors import DiskError
from qmq_broker.storage.files import layout
from qmq_client.clock import SYSTEM_CLOCK, Clock
from qmq_client.transport.address import BrokerAddress
from qmq_client.wire.errors import ProtocolError
from qmq_client.wire.operations import KeepRequest
from qmq_client.wire.requests import UNKNOWN_ROUTES, ErrorAnswer, decode_json
from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.disks import ReadDisk, ReadFile
from qmq_pipeline.places.outage import WAIT_S, AwayError, Outage, is_about_trust

#: Bytes of one request while a file is read from front to back; the broker returns no more in one answer.
AHEAD_BYTES: Final = 8 * 1024 * 1024
#: … and the fewest, after interrupted answers: a request costs about as much as this many bytes.
_ANSWER_BYTES_MIN: Final = 64 * 1024
_TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
#: Statuses after which another attempt may succeed: of a broker that starts or stops, and of a proxy in front of it.
_AGAIN: Final = frozenset({429, 502, 503, 504})
_DENIED: Final = frozenset({401, 403})
_READ: Final = "/v1/files/read"
_SEGMENTS: Final = (f"{layout.COMMIT_LOG}/", f"{layout.ACTION_LOG}/")
_REMEDY: Final = "Check whether it runs there (`qmq doctor --broker URL`), and try again"
_Result = TypeVar("_Result")


class RemoteDisk(ReadDisk):
    """The files of the broker at `address`. One thread at a time; connections stay open."""

    gives_durable_alone: ClassVar[bool] = True

    def __init__(
        self, address: BrokerAddress, *, wait_s: float = WAIT_S, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """`wait_s`: how long to wait for an unreachable broker before `UnreachableError`.

        Raises `ConfigurationError` for bad certificates, `SourceError` for a bad address.
        """
        self._url = address.url.rstrip("/")
        self._outage = Outage(self._url, wait_s, clock=clock)
        #: Most bytes of one request: few after interrupted answers, because the lost rest is wasted work.
        self._answer_bytes = AHEAD_BYTES
        try:
            self._client = httpx.Client(
                base_url=self._url,
                headers={"accept-encoding": "identity", **address.headers()},
                timeout=_TIMEOUT,
                verify=address.ssl_context(),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError, TypeError) as error:
            raise _unusable(self._url, str(error)) from error

    def open(self, path: str, *, is_new: bool = False) -> ReadFile:
        return _RemoteFile(self, path)

    def names(self, directory: str) -> list[str]:
        answer = self._answer("GET", "/v1/files", params={"directory": directory})
        self._check(answer, "/v1/files")
        try:
            return sorted(str(name) for name in answer.json()["names"])
        except (ValueError, KeyError, TypeError) as error:
            raise _unusable(
                self._url, "the server there is not a broker of this version"
            ) from error

    def close(self) -> None:
        self._client.close()

    def read(self, path: str, first: int, count: int) -> bytes:
        """Bytes of one file; fewer at its end."""
        parts: list[bytes] = []
        while not self._until_answered(lambda: self._read_on(path, first, count, parts)):
            pass
        return b"".join(parts)

    def keep(self, request: KeepRequest) -> dict[str, Any] | None:
        """Report to the broker the archived offsets of its logs; returns the new state of the keeper.

        Returns None for a broker without keepers. Raises `SourceError` if it refuses.
        """
        answer = self._answer("POST", "/v1/keepers/keep", json=msgspec.to_builtins(request))
        if answer.status_code == httpx.codes.OK:
            kept: dict[str, Any] = answer.json()
            return kept
        refused = _refusal(answer)
        if refused is None:
            raise _unusable(
                self._url, f"the answer to /v1/keepers/keep has status {answer.status_code}"
            )
        if refused.code == UNKNOWN_ROUTES[404]:
            return None
        remedy = refused.remedy or "The written tables stay; try again"
        said = refused.message.removesuffix(remedy).rstrip(". ")
        raise SourceError(
            source=self._url,
            reason=f"retention does not wait for {request.name}: {said}",
            remedy=remedy,
        )

    def _read_on(self, path: str, first: int, count: int, parts: list[bytes]) -> bool:
        """Request the bytes that are not in `parts` yet, and add them as they arrive; returns
        whether the end was reached.

        A file that is not a segment is replaced as a whole, so an incomplete answer about it is discarded.
        """
        is_segment = path.startswith(_SEGMENTS)
        if not is_segment:
            parts.clear()
        done = sum(map(len, parts))
        rest = count - done
        if parts and not rest:  # the answer was interrupted after its last byte
            return True
        wanted = min(rest, self._answer_bytes) if is_segment else rest
        came = 0
        try:
            for part in self._parts(path, first + done, wanted):
                came += len(part)
                parts.append(part)
                if is_segment:
                    self._outage.arrived()
        except httpx.HTTPError:
            self._answer_bytes = max(_ANSWER_BYTES_MIN, came)
            raise
        self._answer_bytes = min(2 * self._answer_bytes, AHEAD_BYTES)
        return came < wanted or wanted == rest

    def _parts(self, path: str, first: int, count: int) -> Iterator[bytes]:
        """Bytes of one file, as they arrive."""
        asked: dict[str, str | int] = {"path": path, "first": first, "count": count}
        with self._client.stream("GET", _READ, params=asked) as answer:
            self._check_now(answer)
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise DiskError(operation="read", path=path, reason="the broker no longer has it")
            self._check(answer, _READ)
            left = count
            for part in answer.iter_bytes():
                left -= len(part)
                if left < 0:
                    raise _unusable(
                        self._url,
                        f"the answer to {_READ} is longer than the {count} bytes asked for",
                    )
                yield part

    def _answer(self, method: str, route: str, **request: Any) -> httpx.Response:
        return self._until_answered(lambda: self._answer_once(method, route, **request))

    def _answer_once(self, method: str, route: str, **request: Any) -> httpx.Response:
        answer = self._client.request(method, route, **request)
        self._check_now(answer)
        return answer

    def _until_answered(self, call: Callable[[], _Result]) -> _Result:
        """The result of a call, which is repeated while the broker is unreachable."""
        return self._outage.outlast(lambda: self._once(call), remedy=_REMEDY)

    def _once(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except (httpx.UnsupportedProtocol, UnicodeError) as error:  # an invalid host name
            raise _unusable(self._url, str(error)) from error
        except httpx.HTTPError as error:
            if is_about_trust(error):
                raise SourceError(
                    source=self._url,
                    reason=f"no connection by TLS: {error}",
                    remedy="Check broker.ca_file, broker.cert_file and broker.key_file, and whether the address has to "
                    "begin with http:// or https://",
                ) from error
            raise AwayError(str(error) or type(error).__name__) from error

    def _check_now(self, answer: httpx.Response) -> None:
        """Raise the error for a status with the same meaning on every route."""
        if answer.status_code in _AGAIN:
            raise AwayError(f"status {answer.status_code}")
        if answer.status_code in _DENIED:
            raise SourceError(
                source=self._url,
                reason=f"the broker refuses this token (status {answer.status_code})",
                remedy="Give one that may consume all subjects: --token-file of a command, the option token_file "
                "of a source, or QMQ_BROKER_TOKEN",
            )

    def _check(self, answer: httpx.Response, route: str) -> None:
        if answer.status_code != httpx.codes.OK:
            raise _unusable(self._url, f"the answer to {route} has status {answer.status_code}")


class _RemoteFile(ReadFile):
    """One file; reads ahead while it is read from front to back."""

    def __init__(self, disk: RemoteDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._block = b""
        self._first = 0
        self._next = inf

    def end_at(self, position: int) -> None:
        self._next = position

    def read(self, position: int, count: int) -> bytes:
        begin = position - self._first
        if begin >= 0 and begin + count <= len(self._block):
            return self._block[begin : begin + count]
        is_in_order = 0 <= begin <= len(self._block) and self._block
        self._block = self._block[begin:] if is_in_order else b""
        self._first = position
        ahead = self._next - position - len(self._block) if is_in_order else 0
        while (rest := count - len(self._block)) > 0:  # more than once: longer than one answer
            wanted = int(min(max(rest, ahead), AHEAD_BYTES))
            more = self._disk.read(self._path, position + len(self._block), wanted)
            self._block += more
            if len(more) < wanted:
                break
        return self._block[:count]

    def close(self) -> None:
        """Drop the bytes that were read ahead; the connection belongs to the disk."""
        self._block = b""

    def length(self) -> int:
        """For small files only, because it reads the whole file."""
        self._first = 0
        self._block = self._disk.read(self._path, 0, AHEAD_BYTES)
        return len(self._block)


def _refusal(answer: httpx.Response) -> ErrorAnswer | None:
    """The text of a broker's refusal; None if it is not an answer of a broker."""
    try:
        return decode_json(answer.content, ErrorAnswer)
    except ProtocolError:
        return None


def _unusable(url: str, reason: str) -> SourceError:
    return SourceError(
        source=url,
        reason=reason.rstrip("."),
        remedy="Give the address of a broker, like http://host:9470",
    )
