"""CRC-32C: the vectors of RFC 3720, and the fallback equal to the extension."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.wire import checksum
from qmq_client.wire.checksum import crc32c, crc32c_in_python, crc32c_without
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
    assert crc32c_in_python(0, data) == expected


@examples(100)
@given(data=st.binary(max_size=600), seed=st.integers(0, 2**32 - 1))
def test_the_fallback_equals_the_extension(data: bytes, seed: int) -> None:
    assert crc32c_in_python(seed, data) == crc32c(data, seed)


@examples(100)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_a_checksum_continues_from_what_came_before(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second)
    assert crc32c_in_python(crc32c_in_python(0, first), second) == crc32c(first + second)


@pytest.mark.parametrize("long_bytes", [0, 2**40], ids=["linear", "joined"])
@examples(100)
@given(data=st.binary(max_size=600), cut=st.tuples(st.integers(0, 600), st.integers(0, 600)))
def test_a_part_may_be_left_out_of_a_checksum(
    data: bytes, cut: tuple[int, int], long_bytes: int
) -> None:
    first, after = sorted(min(one, len(data)) for one in cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_LONG_BYTES", long_bytes)
        assert crc32c_without(data, first, after) == crc32c(data[:first] + data[after:])


def test_a_part_of_a_long_body_may_be_left_out() -> None:
    data = bytes(range(256)) * 5_000
    assert crc32c_without(data, 16, 64) == crc32c(data[:16] + data[64:])
    assert crc32c_without(data, 16, len(data)) == crc32c(data[:16])


def test_the_extension_is_what_runs_here() -> None:
    assert checksum.extend_crc32c is not crc32c_in_python


def loaded_with(extension: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A second copy of the module, imported where `google_crc32c` is this, or nothing."""
    monkeypatch.setitem(sys.modules, "google_crc32c", extension)
    spec = importlib.util.spec_from_file_location("checksum_again", checksum.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_the_extension_the_fallback_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded_with(None, monkeypatch)
    assert module.extend_crc32c is module.crc32c_in_python
    assert module.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("implementation", ["c", "python"])
def test_an_extension_that_counts_wrong_or_is_slow_is_not_used(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ModuleType("google_crc32c")
    wrong.__dict__.update(implementation=implementation, extend=lambda seed, data: 1)
    module = loaded_with(wrong, monkeypatch)
    assert module.extend_crc32c is module.crc32c_in_python


def test_only_bytes_are_taken_so_that_a_buffer_cannot_change_under_the_checksum() -> None:
    for data in (bytearray(b"123456789"), memoryview(b"123456789")):
        with pytest.raises(TypeError):
            crc32c(data)  # type: ignore[arg-type]  # the mistake
