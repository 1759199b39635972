"""CRC-32C (Castagnoli), the one checksum of every format here.

Uses the `google-crc32c` extension; where it is absent, a table in pure Python takes its place
(about 500 times slower, same results). Whichever is used is verified against the check value of
RFC 3720 appendix B.4 when this module is imported.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import Final

_REFLECTED_POLYNOMIAL: Final = 0x82F63B78
#: So many bytes are not copied for a checksum.
_LONG_BYTES: Final = 256 * 1024
_CHECK_INPUT: Final = b"123456789"
_CHECK_VALUE: Final = 0xE3069283


def _make_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_REFLECTED_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE: Final = _make_table()


def crc32c_in_python(seed: int, data: bytes) -> int:
    """The same as `crc32c`, without the extension."""
    table = _TABLE
    value = seed ^ 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _choose() -> Callable[[int, bytes], int]:
    try:
        import google_crc32c  # optional at run time: the fallback is complete
    except ImportError:
        return crc32c_in_python
    if getattr(google_crc32c, "implementation", "") != "c":
        return crc32c_in_python
    extend: Callable[[int, bytes], int] = google_crc32c.extend
    return extend if extend(0, _CHECK_INPUT) == _CHECK_VALUE else crc32c_in_python


#: CRC-32C that continues from a seed, which stands first: the same as `crc32c` without a call more,
#: for those who make one for every message.
extend_crc32c: Final = _choose()
if crc32c_in_python(0, _CHECK_INPUT) != _CHECK_VALUE:
    raise AssertionError("CRC-32C fallback is wrong")


def crc32c_without(data: bytes, first: int, after: int) -> int:
    """CRC-32C of `data` without its bytes from `first` until before `after`.

    What is behind them is not copied when it is long, which would cost more than the checksum: that
    is linear, so the one of the whole, less what the left-out part did to it, is the same.
    """
    if len(data) < _LONG_BYTES:
        return extend_crc32c(extend_crc32c(0, data[:first]), data[after:])
    done = extend_crc32c(0, data[:after]) ^ extend_crc32c(0, data[:first])
    return extend_crc32c(0, data) ^ _shifted(done, len(data) - after)


def _shifted(value: int, count: int) -> int:
    """What a checksum becomes by `count` bytes of zeros behind it, as far as it depends on them."""
    for shift in range(0, count.bit_length(), 4):
        zeros = count & 15 << shift
        if zeros:
            one, two, three, four = _shift_tables(zeros)
            value = (
                one[value & 255]
                ^ two[value >> 8 & 255]
                ^ three[value >> 16 & 255]
                ^ four[value >> 24]
            )
    return value


@cache
def _shift_tables(zeros: int) -> tuple[array[int], ...]:
    """For each of its four bytes, what a checksum's byte adds behind so many zero bytes: 4 KiB.

    Asked for numbers with one hexadecimal digit that is not zero, so there are few.
    """
    bits = [1 << bit for bit in range(32)]
    if zeros == 1:
        images = [(bit >> 8) ^ _TABLE[bit & 255] for bit in bits]
    else:
        half = zeros // 2
        images = [_shifted(_shifted(bit, half), zeros - half) for bit in bits]
    tables = []
    for first in range(0, 32, 8):
        table = array("I", [0]) * 256
        for byte in range(1, 256):
            lowest = byte & -byte
            table[byte] = table[byte ^ lowest] ^ images[first + lowest.bit_length() - 1]
        tables.append(table)
    return tuple(tables)


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C of `data`, continuing from `seed` (the CRC of what came before; 0 at the start)."""
    return extend_crc32c(seed, data)
