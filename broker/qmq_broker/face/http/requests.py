"""Checks of a request's head before its body is read, and the memory budgets of bodies and answers.

Deadlines of head and body belong to the connection (`connection/protocol.py`), not to this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self, TypeVar

import msgspec
from starlette.types import Scope

from qmq_broker.face.answers import RequestRefusedError, busy, refuse
from qmq_broker.face.authentication.access import CALLER, UNIDENTIFIED, Caller
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.strict_json import read_json
from qmq_broker.service.room import Bound
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    JSON_CONTENT_TYPE,
    decode_control,
    encode_control,
    encode_json,
)

T = TypeVar("T")


class Encoding(Enum):
    """The encoding of a body; the value is its content type."""

    FRAME = FRAME_CONTENT_TYPE.encode()
    JSON = JSON_CONTENT_TYPE.encode()


#: Bytes that a connection buffers before it makes its writer wait; asyncio's own limit.
_BUFFERED_BYTES: Final = 64 * 1024
_CHARSETS: Final = (b"utf-8", b"utf8", b"us-ascii")
_ENCODINGS: Final = {encoding.value: encoding for encoding in Encoding}
#: Key in the state of a connection: a function that ends it at once, even with a part of an answer unsent.
DROP: Final = "qmq.drop"


class ClientGone(Exception):  # noqa: N818  # not an error: it is never answered
    """The client closed the connection; no answer is possible."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of a request that concern bodies."""

    #: None when the request names no content type.
    content_type: bytes | None
    content_encoding: bytes | None
    #: None when the length is not known before the end.
    content_bytes: int | None
    is_chunked: bool
    accept: bytes | None
    #: The caller who sent it.
    caller: Caller

    def answer_encoding(self) -> Encoding:
        """The encoding of the answer: that of the request, unless `Accept` names the other one."""
        accepted = _ENCODINGS.get(self.accept or b"")
        if accepted is not None:  # exactly one of the two, as QMQ's clients write it
            return accepted
        if self.accept is not None:
            wanted = [encoding for encoding in Encoding if encoding.value in self.accept]
            if len(wanted) == 1:
                return wanted[0]
        return _ENCODINGS.get(_media_type(self.content_type), Encoding.JSON)


def read_head(scope: Scope) -> Head:
    """The head of a request, in one pass over its headers."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found[name] = value
    length = found.get(b"content-length")
    return Head(
        content_type=found.get(b"content-type"),
        content_encoding=found.get(b"content-encoding"),
        content_bytes=int(length) if length is not None and length.isdigit() else None,
        is_chunked=b"transfer-encoding" in found,
        accept=found.get(b"accept"),
        caller=scope.get(CALLER, UNIDENTIFIED),
    )


def check_head(head: Head, *, frame_bytes_max: int, json_bytes_max: int) -> tuple[Encoding, int]:
    """The request's encoding and the limit of its body.

    Raises `RequestRefusedError` before any byte of the body is read.
    """
    if head.content_encoding not in (None, b"identity"):
        raise refuse(
            415,
            "content_encoding",
            "the content-encoding is not identity",
            field="content-encoding",
            limit="identity",
            remedy="Send the body uncompressed.",
        )
    check_charset(head.content_type)
    encoding = _ENCODINGS.get(_media_type(head.content_type))
    if encoding is None:
        raise refuse(
            415,
            "content_type",
            f"the content-type is not {FRAME_CONTENT_TYPE} or {JSON_CONTENT_TYPE}",
            field="content-type",
            limit=f"{FRAME_CONTENT_TYPE} or {JSON_CONTENT_TYPE}",
            remedy="Send the content type of the body.",
        )
    if head.content_bytes is None and not head.is_chunked:
        raise refuse(
            411,
            "length_required",
            "the request has no content-length",
            field="content-length",
            remedy="Send the length of the body.",
        )
    body_bytes_max = frame_bytes_max if encoding is Encoding.FRAME else json_bytes_max
    if head.content_bytes is not None and head.content_bytes > body_bytes_max:
        raise too_long(body_bytes_max, f"{head.content_bytes} bytes")
    return encoding, body_bytes_max


class BodyRoom:
    """The limits of simultaneous requests, and of the memory of their bodies and answers."""

    def __init__(self, limits: FaceLimits) -> None:
        self._limits = limits
        #: Bytes of request bodies that have arrived.
        self.taken_bytes = 0
        #: Bytes of answers that their clients have not read yet.
        self.unread_bytes = 0
        #: Answers that were begun and not read yet, the first one first.
        self._unread: dict[_Unread, None] = {}
        self._dropped = 0
        self.requests = 0

    def begin_request(self) -> None:
        """Count one request until `end_request`; raises `RequestRefusedError` if too many are in progress."""
        if self.requests >= self._limits.requests:
            raise busy("requests in progress", self.requests, self._limits.requests)
        self.requests += 1

    def end_request(self) -> None:
        """The request has ended, successfully or not."""
        self.requests -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Stop counting a waiting pull, which has its own limit."""
        self.requests -= 1
        try:
            yield
        finally:
            self.requests += 1

    def body(self, claimed_bytes: int) -> BodyShare:
        """The share of one body, to be closed; raises `RequestRefusedError` if there is no room for it.

        The length in a head takes no room yet: otherwise a few slow clients could hold all of it with a few bytes.
        """
        self._check_body(claimed_bytes)
        return BodyShare(self)

    def take(self, share: BodyShare, count: int) -> None:
        """Give more room to one body; raises `RequestRefusedError` if there is none."""
        self._check_body(count)
        share.taken_bytes += count
        self.taken_bytes += count

    def check_answer(self, answer_bytes: int) -> None:
        """Raise `RequestRefusedError` when there is no room for an answer of this length.

        Call it before messages are delivered: a refused delivery would cost them an attempt. An
        answer that fits the buffer of a connection, as the refusal would, needs no room.
        """
        if answer_bytes <= _BUFFERED_BYTES:
            return
        self._make_room(answer_bytes)
        if not self._has_room(answer_bytes):
            raise busy("bytes of unread answers", self.unread_bytes, self._limits.answers_bytes)

    @contextmanager
    def answer(self, answer_bytes: int, scope: Scope) -> Iterator[None]:
        """Count an answer to this request until its client has read it or is dropped."""
        unread = _Unread(
            answer_bytes=answer_bytes,
            since_s=asyncio.get_running_loop().time(),
            drop=scope.get("state", {}).get(DROP),
        )
        self._unread[unread] = None
        self.unread_bytes += answer_bytes
        try:
            yield
        finally:
            self._forget(unread)

    def bounds(self) -> tuple[Bound, ...]:
        """The use of each limit."""
        bodies = Bound(name="bodies_bytes", used=self.taken_bytes, limit=self._limits.bodies_bytes)
        answers = Bound(
            name="answers_bytes", used=self.unread_bytes, limit=self._limits.answers_bytes
        )
        return bodies, answers

    def take_dropped(self) -> int:
        """How many clients were dropped since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _make_room(self, answer_bytes: int) -> None:
        """Drop clients that have taken too long to read, the longest first, until an answer fits."""
        now_s = asyncio.get_running_loop().time()
        for unread in list(self._unread):
            age_ms = (now_s - unread.since_s) * 1000
            if self._has_room(answer_bytes) or age_ms <= self._limits.unread_wanted_ms:
                return
            if unread.drop is not None:
                self._forget(unread)
                self._dropped += 1
                unread.drop()

    def _has_room(self, answer_bytes: int) -> bool:
        return self.unread_bytes + answer_bytes <= self._limits.answers_bytes

    def _forget(self, unread: _Unread) -> None:
        if unread in self._unread:
            del self._unread[unread]
            self.unread_bytes -= unread.answer_bytes

    def _check_body(self, count: int) -> None:
        if self.taken_bytes + count > self._limits.bodies_bytes:
            raise busy("bytes of request bodies", self.taken_bytes, self._limits.bodies_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Unread:
    """An answer that its client has not read to the end."""

    answer_bytes: int
    #: Loop time at which it was begun.
    since_s: float
    #: Ends the connection; None if there is no connection.
    drop: Callable[[], object] | None


class BodyShare:
    """The room that one body has taken; returned at the end of a `with`."""

    __slots__ = ("_room", "taken_bytes")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.taken_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.taken_bytes -= self.taken_bytes

    def take(self, count: int) -> None:
        """This many more bytes have arrived."""
        self._room.take(self, count)


def decode(encoding: Encoding, body: bytes, kind: type[T]) -> T:
    """A request struct from its body; raises `ProtocolError` or `InvalidMessageError`."""
    if encoding is Encoding.FRAME:
        return decode_control(body, kind)
    return read_json(body, kind)


def encode(encoding: Encoding, value: msgspec.Struct) -> bytes:
    """An answer's body."""
    return encode_control(value) if encoding is Encoding.FRAME else encode_json(value)


def in_pieces(body: bytes, piece_bytes: int) -> Iterator[memoryview]:
    """Split a long body into pieces; each is written after the previous one has left this process."""
    whole = memoryview(body)
    return (whole[first : first + piece_bytes] for first in range(0, len(body), piece_bytes))


def check_charset(content_type: bytes | None) -> None:
    """Raise `RequestRefusedError` (415) for a body declared in another encoding than UTF-8."""
    for part in (content_type or b"").split(b";")[1:]:
        name, _, value = part.strip().lower().partition(b"=")
        if name.strip() == b"charset" and value.strip().strip(b'"') not in _CHARSETS:
            raise refuse(
                415,
                "charset",
                "the charset of the content-type is not utf-8",
                field="content-type",
                limit="charset=utf-8",
                value=value.decode("ascii", "replace")[:40],
                remedy="Send the body as UTF-8.",
            )


def _media_type(value: bytes | None) -> bytes:
    return b"" if value is None else value.split(b";", 1)[0].strip().lower()


def too_long(body_bytes_max: int, value: str) -> RequestRefusedError:
    """The refusal of a body that is too long."""
    return refuse(
        413,
        "body_too_large",
        f"the body has {value}; allowed: {body_bytes_max} bytes",
        field="body",
        limit=f"{body_bytes_max} bytes",
        value=value,
        remedy="Send several requests.",
    )
