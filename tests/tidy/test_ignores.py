"""Where a type is passed over, the reason stands beside it."""

from __future__ import annotations

import re

from tests.tidy.house import Source, python

_IGNORED = re.compile(r"#\s*type:\s*ignore\b")
_WITH_REASON = re.compile(r"# type: ignore\[[a-z, -]+\]  # \S")


def unexplained(source: Source) -> list[str]:
    """Lines that pass a type over without naming the check and the reason."""
    return [
        f"{source.path}:{number}"
        for number, line in enumerate(source.text.splitlines(), start=1)
        if _IGNORED.search(line) and not _WITH_REASON.search(line)
    ]


def test_a_type_that_is_passed_over_has_its_reason_beside_it() -> None:
    others = [source for source in python() if not __file__.endswith(source.path)]
    assert [one for source in others for one in unexplained(source)] == []


def test_a_planted_one_is_found() -> None:
    for text in ("a = 1  # type: ignore", "a = 1  # type: ignore[misc]", "a = 1  #type:ignore"):
        assert unexplained(Source(path="a.py", text=text)) == ["a.py:1"], text
    explained = "a = 1  # type: ignore[misc, arg-type]  # the mistake"
    assert not unexplained(Source(path="a.py", text=explained))
