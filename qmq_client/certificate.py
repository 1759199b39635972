"""Parser of the validity of a certificate file; Python's `ssl` shows only that of a peer's certificate.

It follows only the path to the two times (RFC 5280, section 4.1)::

    Certificate ::= SEQUENCE { TBSCertificate, … }
    TBSCertificate ::= SEQUENCE { [0] version, serialNumber, signature, issuer, validity, … }
    validity ::= SEQUENCE { notBefore, notAfter }       each UTCTime or GeneralizedTime

It does not verify the signature.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import Final, NamedTuple

_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
#: Fields before the validity, without the version: serial number, signature algorithm, issuer.
_BEFORE_VALIDITY: Final = 3
#: UTCTime and GeneralizedTime, in UTC to the second. A year of two digits is one from 1950 to 2049.
_UTC_TIME: Final = 0x17
_FORMS: Final = {_UTC_TIME: "%Y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}
_CENTURY_TURNS: Final = 50
#: A larger byte is not the length itself but the number of length bytes that follow.
_SHORT_LENGTH: Final = 0x80
#: How long before its end a certificate should be renewed: time to notice, even after a holiday.
_ENDS_SOON_MS: Final = 14 * 24 * 3_600_000
_DAY_MS: Final = 24 * 3_600_000
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


class Validity(NamedTuple):
    """The first and the last moment of validity, both inclusive; milliseconds since 1970."""

    first_ms: int
    last_ms: int

    def fault(self, now_ms: int) -> str:
        """The reason why every peer refuses the certificate now; empty if it is valid."""
        if now_ms > self.last_ms:
            return "has expired"
        return "is not yet valid" if now_ms < self.first_ms else ""

    def days_left(self, now_ms: int) -> int | None:
        """Whole days until it expires, if it should be renewed soon; otherwise None."""
        left_ms = self.last_ms - now_ms
        return left_ms // _DAY_MS if left_ms < _ENDS_SOON_MS else None


def validity_of(pem: str) -> Validity:
    """The validity of the first certificate in a PEM chain; raises `ValueError` if there is none."""
    first = pem.find(_BEGIN)
    end = pem.find(_END, first)
    if first < 0 or end < 0:
        raise ValueError("no certificate in PEM")
    der = ssl.PEM_cert_to_DER_cert(pem[first : end + len(_END)] + "\n")
    try:
        return _validity(der)
    except IndexError as error:
        raise ValueError("a certificate that ends early") from error


def _validity(der: bytes) -> Validity:
    position = _inside(der, _inside(der, 0, _SEQUENCE), _SEQUENCE)
    if der[position] == _VERSION:
        position = _after(der, position)
    for _ in range(_BEFORE_VALIDITY):
        position = _after(der, position)
    first = _inside(der, position, _SEQUENCE)
    return Validity(_time_ms(der, first), _time_ms(der, _after(der, first)))


def _part(der: bytes, position: int) -> tuple[int, int]:
    """The position of the content of the element at `position`, and its length."""
    length, first = der[position + 1], position + 2
    if length <= _SHORT_LENGTH:
        return first, length
    after = first + length - _SHORT_LENGTH
    return after, int.from_bytes(der[first:after], "big")


def _inside(der: bytes, position: int, tag: int) -> int:
    if der[position] != tag:
        raise ValueError(f"not a certificate: {der[position]:#x} at {position}")
    return _part(der, position)[0]


def _after(der: bytes, position: int) -> int:
    first, length = _part(der, position)
    return first + length


def _time_ms(der: bytes, position: int) -> int:
    tag = der[position]
    first, length = _part(der, position)
    text = der[first : first + length].decode("ascii")
    if tag not in _FORMS:
        raise ValueError(f"not a time of a certificate: {tag:#x} at {position}")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_TURNS else "20") + text
    at = datetime.strptime(text, _FORMS[tag]).replace(tzinfo=UTC)
    return int(at.timestamp()) * 1000
