"""CRC-32C: the vectors of RFC 3720, and the fallback equal to the extension."""

from __future__ import annotations

import importlib.util
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire import checksum
from qmq_client.wire.checksum import Checksum, crc32c, crc32c_in_python, crc32c_without
from tests.wire.hostile import examples

#: RFC 3720, appendix B.4, and the check value of the CRC catalogues.
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (
        bytes.fromhex(
            "01c00000000000000000000000000000"
            "14000000000004000000001400000018"
            "28000000000000000200000000000000"
        ),
        0xD9963A56,
    ),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors_come_out_right_with_and_without_the_extension(
    data: bytes, expected: int
) -> None:
    assert crc32c(data) == expected
    assert crc32c_in_python(data) == expected


@examples(100)
@given(data=st.binary(max_size=600), seed=st.integers(0, 2**32 - 1))
def test_the_fallback_equals_the_extension(data: bytes, seed: int) -> None:
    assert crc32c_in_python(data, seed) == crc32c(data, seed)


@examples(100)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_a_checksum_continues_from_what_came_before(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)
    assert crc32c_in_python(second, crc32c_in_python(first)) == crc32c(first + second)


@examples(100)
@given(data=st.binary(max_size=600), cut=st.tuples(st.integers(0, 600), st.integers(0, 600)))
def test_a_part_may_be_left_out_of_a_checksum(data: bytes, cut: tuple[int, int]) -> None:
    first, after = sorted(min(one, len(data)) for one in cut)
    assert crc32c_without(data, first, after) == crc32c(data[:first] + data[after:])


def test_a_part_of_a_long_body_may_be_left_out() -> None:
    data = bytes(range(256)) * 5_000
    assert crc32c_without(data, 16, 64) == crc32c(data[:16] + data[64:])
    assert crc32c_without(data, 16, len(data)) == crc32c(data[:16])


@pytest.mark.parametrize("around", [2**power for power in range(6, 18)])
def test_the_extension_is_right_around_each_length_at_which_it_may_change_its_way(
    around: int,
) -> None:
    data = random.Random(around).randbytes(around + 3)
    whole = crc32c_in_python(data[: around - 2])
    for count in range(around - 2, around + 4):
        assert crc32c(data[:count]) == whole
        assert crc32c(memoryview(data)[1:count], crc32c(data[:1])) == whole
        whole = crc32c_in_python(data[count : count + 1], whole)


def test_the_extension_is_what_runs_here() -> None:
    assert crc32c is not crc32c_in_python
    assert checksum.CRC32C_MADE_BY == "fastcrc"


def loaded_with(extension: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the module, imported where `fastcrc` is this, or nothing."""
    monkeypatch.setitem(sys.modules, "fastcrc", extension)
    spec = importlib.util.spec_from_file_location("checksum_again", checksum.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_extension_the_fallback_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded_with(None, monkeypatch)
    assert module.crc32c is module.crc32c_in_python
    assert module.CRC32C_MADE_BY == "Python"
    assert module.crc32c(b"123456789") == 0xE3069283
    assert module.crc32c_without(b"123abc456789", 3, 6) == 0xE3069283


@pytest.mark.parametrize("right_bytes", [0, 1024], ids=["always", "when it is long"])
def test_an_extension_that_counts_wrong_is_not_used(
    right_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ModuleType("fastcrc")

    def iscsi(data: bytes, seed: int = 0) -> int:
        return crc32c(data, seed) ^ (len(data) > right_bytes)

    wrong.__dict__.update(crc32=SimpleNamespace(iscsi=iscsi))
    module = loaded_with(wrong, monkeypatch)
    assert module.crc32c is module.crc32c_in_python


@pytest.mark.parametrize("make", [crc32c, crc32c_in_python])
def test_a_view_has_the_checksum_of_what_it_shows(make: Checksum) -> None:
    assert make(memoryview(b"0123456789")[1:]) == 0xE3069283
    assert make(memoryview(b"x456789")[1:], make(b"123")) == 0xE3069283
