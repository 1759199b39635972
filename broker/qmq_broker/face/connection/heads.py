"""What the head of a request must say: one host, one length, and a version that is spoken here.

The parser (llhttp) refuses what is no head at all; this refuses what two servers could read in two ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qmq_broker.face.answers import RequestRefusedError, refuse

#: Headers that say where a request ends, whom it is for and whose it is: never more than once.
_ONCE: Final = (b"content-length", b"transfer-encoding", b"host", b"authorization")
_VERSIONS: Final = ("1.0", "1.1")


def head_refusal(
    headers: Iterable[tuple[bytes, bytes]], version: str
) -> RequestRefusedError | None:
    """Why a head with these headers and this version of HTTP is refused; None if it is not."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and name in found:
            return _ambiguous(f"header {name.decode()} given twice")
        found[name] = value
        if b"\n" in value or b"\r" in value:
            return _ambiguous("a header line is folded")
    if b"transfer-encoding" in found:
        if b"content-length" in found:
            return _ambiguous("both content-length and transfer-encoding")
        if found[b"transfer-encoding"].strip().lower() != b"chunked":
            return _ambiguous("a transfer encoding other than chunked")
    if version not in _VERSIONS:
        return no_request(f"HTTP/{version} is not spoken here", "Speak HTTP/1.1.")
    if version == "1.1" and b"host" not in found:
        return no_request("the request names no host", "Send a Host header.")
    return None


def no_request(what: str, remedy: str) -> RequestRefusedError:
    """The refusal of what is no request to this broker."""
    return refuse(400, "bad_request", what, remedy=remedy)


def _ambiguous(what: str) -> RequestRefusedError:
    return refuse(400, "ambiguous_request", what, remedy="Say it once.")
