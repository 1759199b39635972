"""Names: what is one, and what is not."""

from __future__ import annotations

import unicodedata

import hypothesis.strategies as st
import pytest
from hypothesis import given

from qmq_client.wire.errors import InvalidMessageError, InvalidNameError
from qmq_client.wire.limits import NAME_BYTES_MAX
from qmq_client.wire.names import check_name, is_name
from qmq_client.wire.shown import shorten
from tests.wire.hostile import NAME_ALPHABET, examples

GOOD = [
    "a", "A", "0", "_", "flight.departed", "a-b_c.D9", "a..b", "a.", "a-", "_.", "CON", "nul", "com1",
    "x" * NAME_BYTES_MAX,
]  # fmt: skip

HOSTILE = [
    "", ".", "..", "../a", "a/../b", "a/b", "/a", "a\\b", "..\\a", "%2e%2e%2f", "%00", "a%",
    "\0", "a\0", "a\0b", "\r", "\n", "a\r\n", "a\nb", "a\n", "a\r", "a\x85", "a\u2028", "a\x0b", "a\x1c",
    " ", " a", "a ", "a b", "a\tb", ".hidden", "-dash", "--help", "-",
    unicodedata.normalize("NFC", "cafe\u0301"), unicodedata.normalize("NFD", "caf\u00e9"),
    "ｆｕｌｌｗｉｄｔｈ", "а", "ſ", "ß", "٣", "²", "𝟘", "\u212a", "a\u200b", "\ufeffa", "a\u202eb", "😀", "a😀",
    "x" * (NAME_BYTES_MAX + 1), "x" * 255, "x" * 300, "x" * 1_000_000,
    "a,b", "a:b", "a*", "a?", "a|b", "<a>", '"a"', "'a'", "a;b", "$a", "~", "~a", "a&b", "a+b", "a=b",
    "\ud800", "a\udcff",
]  # fmt: skip

NOT_TEXT: list[object] = [None, 0, 1.5, True, b"flight", ["a"], ("a",), {"a": 1}, {"a"}, ..., str]


@pytest.mark.parametrize("text", GOOD, ids=lambda text: ascii(text)[:30])
def test_a_good_name_is_returned_as_it_is(text: str) -> None:
    assert is_name(text)
    assert check_name(text, field="subject") is text


@pytest.mark.parametrize("text", [*HOSTILE, *NOT_TEXT], ids=lambda text: ascii(text)[:30])
def test_what_is_no_name_is_refused_with_field_limit_value_and_remedy(text: object) -> None:
    assert not is_name(text)
    with pytest.raises(InvalidNameError) as caught:
        check_name(text, field="subject")
    error = caught.value
    assert error.field == "subject"
    assert error.limit == "1 to 127 characters of A-Z a-z 0-9 _ . -, not starting with . or -"
    assert error.value == shorten(text)
    assert error.remedy == "Choose another subject."
    assert error.code == "invalid_name"
    for part in (error.field, error.limit, error.value, error.remedy):
        assert part in str(error)
    assert isinstance(error, InvalidMessageError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:30])
def test_a_name_is_refused_again_after_its_first_refusal(text: str) -> None:
    assert [is_name(text) for _ in range(3)] == [False] * 3


@examples(200)
@given(st.text(max_size=140) | st.text(NAME_ALPHABET, min_size=1, max_size=140))
def test_a_name_has_a_good_first_letter_good_letters_and_at_most_127(text: str) -> None:
    expected = (
        1 <= len(text) <= 127
        and text[0] not in ".-"
        and all(char in NAME_ALPHABET for char in text)
    )
    assert is_name(text) is expected


def test_texts_of_megabytes_are_not_kept() -> None:
    from qmq_client.wire import names

    before = names._matches.cache_info().currsize
    for count in range(20):
        assert not is_name("y" * (100_000 + count))
    assert names._matches.cache_info().currsize == before
