"""Tokens: their form, their stored hashes, and the check of a presented token.

::

    qmq_<16 hex digits: its id>_<64 hex digits: the secret>

Only the SHA-256 of the whole text is stored: the secret has 256 random bits, so a slower hash would
make guessing no harder. The id is public, in lists and logs. A wrong secret, an unknown id and an
expired token cost the same work and get the same answer; hashes are compared in constant time.

The file is JSON, `{"version": 1, "tokens": […]}`. Several tokens of one name may be valid at once,
so that they can be changed without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec

from qmq_broker.face.authentication.access import Caller, Right

#: Most tokens; more clients need another way of identification.
TOKENS_MAX: Final = 10_000
RIGHTS_MAX: Final = 100
#: Enough for the largest number of tokens with several rights each.
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_ID_BYTES: Final = 8
_SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(r"qmq_([0-9a-f]{16})_[0-9a-f]{64}\Z")
_NO_DIGEST: Final = bytes(32)

_Id = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
_Label = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_.@-]{1,63}\Z")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
_CertificateName = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]{0,255}\Z")]


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token or one client certificate, as the file stores it."""

    id: _Id
    #: The client that it was made for; several tokens may share a name.
    name: _Label
    rights: Annotated[tuple[Right, ...], msgspec.Meta(min_length=1, max_length=RIGHTS_MAX)]
    #: SHA-256 of the token in hex; empty for a certificate.
    digest: _Digest = ""
    #: The name in the client certificate; empty for a token.
    certificate: _CertificateName = ""
    made_at_ms: int = 0
    #: 0 for never.
    ends_at_ms: int = 0

    def is_valid(self, now_ms: int) -> bool:
        """Whether the token has not expired."""
        return not self.ends_at_ms or now_ms < self.ends_at_ms


class TokenList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a tokens file."""

    version: Literal[1] = 1
    tokens: Annotated[tuple[TokenEntry, ...], msgspec.Meta(max_length=TOKENS_MAX)] = ()


class Tokens:
    """The tokens of one broker, ready for look-ups. Immutable: a change makes a new object."""

    def __init__(self, entries: Iterable[TokenEntry]) -> None:
        self.entries = tuple(entries)
        self._by_id = {
            entry.id: (entry, bytes.fromhex(entry.digest), _caller(entry))
            for entry in self.entries
            if entry.digest
        }
        self._by_certificate = {
            entry.certificate: (entry, _caller(entry))
            for entry in self.entries
            if entry.certificate
        }

    def find(self, token: str, now_ms: int) -> Caller | None:
        """The caller with this token; None if it is unknown or expired."""
        shown = _TOKEN.match(token)
        found = self._by_id.get(shown[1]) if shown else None
        kept = found[1] if found else _NO_DIGEST
        is_equal = hmac.compare_digest(digest_of(token), kept)
        if found is None or not is_equal or not found[0].is_valid(now_ms):
            return None
        return found[2]

    def find_certificate(self, names: Sequence[str], now_ms: int) -> Caller | None:
        """The caller with a verified certificate of these names; None if unknown or expired."""
        for name in names:
            found = self._by_certificate.get(name)
            if found is not None and found[0].is_valid(now_ms):
                return found[1]
        return None


def new_token() -> tuple[str, str]:
    """The id and the text of a new token; the text is stored nowhere."""
    token_id = secrets.token_hex(_ID_BYTES)
    return token_id, f"qmq_{token_id}_{secrets.token_hex(_SECRET_BYTES)}"


def digest_of(token: str) -> bytes:
    """The SHA-256 of a token, which is stored instead of the token."""
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def decode_tokens(data: bytes) -> TokenList:
    """Decode a tokens file; raises `ValueError`, which names the fault."""
    given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    for field in ("version", "tokens"):  # an empty file must not revoke every token
        if field not in given:
            raise ValueError(f"`{field}` is missing")
    listed = msgspec.json.decode(data, type=TokenList)  # its errors are ValueErrors
    ids = [entry.id for entry in listed.tokens]
    if len(set(ids)) < len(ids):
        raise ValueError("an id is listed twice")
    if any(bool(entry.digest) == bool(entry.certificate) for entry in listed.tokens):
        raise ValueError("an entry needs either a digest or a certificate")
    return listed


def encode_tokens(listed: TokenList) -> bytes:
    """Encode a tokens file, with indentation for people."""
    return msgspec.json.format(msgspec.json.encode(listed), indent=2) + b"\n"


def _caller(entry: TokenEntry) -> Caller:
    return Caller(f"{entry.name} ({entry.id})", entry.rights, owner=entry.name)
