"""CRC-32C (Castagnoli), the checksum of every format.

Computed by `fastcrc` with processor instructions; without it, by a table in pure Python (about a
thousand times slower, same results). An extension that does not give the check value of RFC 3720
appendix B.4, and that of a long input, is not used.
"""

from __future__ import annotations

from typing import Final, Protocol

_REFLECTED_POLYNOMIAL: Final = 0x82F63B78
#: A short and a long input, because an extension may use different code for each.
_CHECKED: Final = ((b"123456789", 0xE3069283), (bytes(range(256)) * 256, 0xA224AF3D))


class Checksum(Protocol):
    """A checksum of bytes that continues from a seed: the checksum of the earlier bytes, 0 at the start."""

    def __call__(self, data: bytes | memoryview, seed: int = 0, /) -> int: ...


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_REFLECTED_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE: Final = _make_table()


def crc32c_in_python(data: bytes | memoryview, seed: int = 0, /) -> int:
    """The same as `crc32c`, without the extension."""
    table = _TABLE
    value = seed ^ 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _choose() -> tuple[Checksum, str]:
    try:
        import fastcrc  # optional at run time: the fallback is complete
    except ImportError:
        return crc32c_in_python, "Python"
    found: Checksum = fastcrc.crc32.iscsi
    if any(found(data) != value for data, value in _CHECKED):
        return crc32c_in_python, "Python"
    return found, "fastcrc"


_CHOSEN: Final = _choose()
#: CRC-32C of bytes. A view is not copied; its memory must not change meanwhile, because other
#: threads run during a long one.
crc32c: Final[Checksum] = _CHOSEN[0]
#: The name of the implementation, for benchmark reports.
CRC32C_MADE_BY: Final[str] = _CHOSEN[1]


def crc32c_without(data: bytes | memoryview, first: int, after: int) -> int:
    """CRC-32C of `data` without its bytes from `first` until before `after`; nothing long is copied."""
    return crc32c(memoryview(data)[after:], crc32c(data[:first]))
