"""Authentication of requests: the caller is determined before any other check.

A broker with tokens refuses requests without one (401), always with the same answer. Rights of a
known caller are checked where the subject is known (`routes/route.py`). On a broker without tokens
every client is `ANYBODY`. A connection with a verified client certificate may be identified by a
name in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.types import Scope

from qmq_broker.face.answers import refuse
from qmq_broker.face.authentication.access import ANYBODY, CALLER, UNIDENTIFIED, Caller
from qmq_broker.face.authentication.token_file import WatchedTokens

#: Key of the scope under which the connection stores the names of a verified certificate.
CERTIFICATE_NAMES: Final = "certificate_names"
_BEARER: Final = b"bearer "
#: Longer than any token; longer values are refused unread.
_HEADER_BYTES_MAX: Final = 200


class Authenticator:
    """Finds the caller of each request. Belongs to the loop thread."""

    def __init__(self, tokens: WatchedTokens | None, now_ms: Callable[[], int]) -> None:
        self._tokens = tokens
        self._now_ms = now_ms
        #: Requests refused since this was last read.
        self.refused = 0
        #: Called when the tokens have changed.
        self.on_changed: Callable[[], object] = lambda: None

    @property
    def has_tokens(self) -> bool:
        """Whether callers need a token."""
        return self._tokens is not None

    def step(self) -> int:
        """Read changed tokens; returns how many requests were refused since the last step."""
        if self._tokens is not None and self._tokens.step():
            self.on_changed()
        refused, self.refused = self.refused, 0
        return refused

    def authenticate(self, scope: Scope, *, is_open: bool = False) -> None:
        """Put the caller into the scope; raises `RequestRefusedError` (401) for one without a valid token.

        Open routes serve callers without a token too.
        """
        if self._tokens is None:
            scope[CALLER] = ANYBODY
            return
        caller = self._known(self._tokens, scope)
        if caller is None and not is_open:
            self.refused += 1
            raise _unknown()
        scope[CALLER] = caller or UNIDENTIFIED

    def _known(self, tokens: WatchedTokens, scope: Scope) -> Caller | None:
        now_ms = self._now_ms()
        for name, value in scope["headers"]:
            if name == b"authorization":
                return tokens.current.find(_token_in(value), now_ms)
        names: Sequence[str] = scope.get("state", {}).get(CERTIFICATE_NAMES, ())
        return tokens.current.find_certificate(names, now_ms) if names else None


def caller_of(scope: Scope) -> Caller:
    """The caller that `Authenticator.authenticate` found."""
    caller: Caller = scope[CALLER]
    return caller


def certificate_names(certificate: dict[str, Any] | None) -> tuple[str, ...]:
    """The names in a verified certificate: its alternative names, then its common name."""
    if not certificate:
        return ()
    names = [
        value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")
    ]
    names += [
        value
        for part in certificate.get("subject", ())
        for kind, value in part
        if kind == "commonName"
    ]
    return tuple(names)


def _token_in(header: bytes) -> str:
    if len(header) > _HEADER_BYTES_MAX or header[: len(_BEARER)].lower() != _BEARER:
        return ""
    return header[len(_BEARER) :].strip().decode("latin-1")


def _unknown() -> Exception:
    return refuse(
        401,
        "unauthenticated",
        "this broker serves only callers with a valid token",
        limit="authorization: Bearer TOKEN",
        remedy="Give a token (QMQ_BROKER_TOKEN, or token_file in [broker] of qmq.toml); "
        "`qmq broker token add` makes one.",
    )
