"""Names and words that do not belong into the house."""

from __future__ import annotations

import ast
import re

from tests.tidy.house import Source, pages, product, python, texts

#: A drawer for everything is where nobody looks.
DRAWERS = {"base", "common", "helper", "helpers", "manager", "util", "utils"}
#: Written so that this file does not hold what it forbids.
LATER = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
#: Folders under which people and machines keep their own things.
PERSONAL = re.compile(r"(?<![\w.:/-])/(home|Users|root|work|workspace|builds|mnt)/\w[^\s`\"')]*")
INDEX = re.compile(
    r"https?://[^\s/]*(pypi|pythonhosted|artifactory|nexus)|\b(extra-)?index[-_]url\b"
    r"|find[-_]links\b|\b(PIP|UV)_[A-Z_]*(INDEX|LINKS)",
    re.IGNORECASE,
)
#: Coined words, for which the field has its own: `docs/style.md`.
COINED = re.compile(
    r"\b(whoever|anew|strangers?|nobody foresaw|for ever|of ours|outlet|let_in|untold|short way)\b",
    re.IGNORECASE,
)
#: The same, in code alone: pages may name what they replace.
COINED_IN_CODE = re.compile(
    r"\b([Nn]obody|[Aa]side|[Bb]eside|[Cc]hores?|[Gg]rip|[Ll]anes?|[Tt]all(y|ies)|[Ww]ish(es)?|in hand"
    r"|([Ii]s|are|was|were|be) (told|away)|[Hh]and(s|ed)? over)\b|_(told|aside|chores?|lanes?|in_hand)\b|\btold_"
)


def drawers(source: Source) -> list[str]:
    parts = source.path.removesuffix(".py").split("/")
    return [source.path] if DRAWERS & set(parts) else []


def hits(source: Source, pattern: re.Pattern[str]) -> list[str]:
    faults = []
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := pattern.search(line):
            faults.append(f"{source.path}:{number} {found[0]}")
    return faults


#: What gives another answer in each process.
DRAWN = {"SystemRandom", "getrandbits", "randbits", "secrets", "time", "urandom", "uuid1", "uuid4"}


def drawn_names(source: Source) -> list[str]:
    """Parameters of tests that are drawn when the module is read."""
    faults = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="parametrize"), args=[_, values, *_]):
                inner = [
                    one for one in ast.walk(values) if isinstance(one, ast.Name | ast.Attribute)
                ]
                words = {one.id if isinstance(one, ast.Name) else one.attr for one in inner}
                faults += [f"{source.path}:{node.lineno} {word}" for word in sorted(words & DRAWN)]
    return faults


def test_workers_of_one_run_give_their_tests_the_same_names() -> None:
    assert [fault for source in python() for fault in drawn_names(source)] == []


def test_no_module_is_a_drawer() -> None:
    assert [fault for source in python() for fault in drawers(source)] == []


def test_product_and_pages_use_the_fields_words() -> None:
    sources = [*product(), *pages()]
    assert [fault for source in sources for fault in hits(source, COINED)] == []
    assert [fault for source in product() for fault in hits(source, COINED_IN_CODE)] == []


def test_nothing_is_left_for_later() -> None:
    assert [fault for source in texts() for fault in hits(source, LATER)] == []


def test_no_file_names_a_personal_folder() -> None:
    assert [fault for source in texts() for fault in hits(source, PERSONAL)] == []


def test_no_file_names_a_package_index() -> None:
    sources = [source for source in texts() if source.path != "tests/tidy/test_names.py"]
    assert [fault for source in sources for fault in hits(source, INDEX)] == []


def test_planted_names_and_words_are_found() -> None:
    assert drawers(Source(path="qmq_client/utils.py", text=""))
    assert drawers(Source(path="broker/common/store.py", text=""))
    assert not drawers(Source(path="qmq_client/database.py", text=""))
    assert hits(Source(path="a.py", text="a\nWhoever pulls"), COINED) == ["a.py:2 Whoever"]
    assert hits(Source(path="a.py", text="row_told = 1"), COINED_IN_CODE) == ["a.py:1 _told"]
    assert hits(Source(path="a.py", text="told_from_ms"), COINED_IN_CODE) == ["a.py:1 told_"]
    assert not hits(Source(path="a.py", text="untold, NOBODY"), COINED_IN_CODE)
    assert hits(Source(path="a.py", text="a\n# TO" + "DO: b"), LATER) == ["a.py:2 TO" + "DO"]
    for path in ["/ho" + "me/ann/qmq", "cd /wo" + "rk/qmq", "'/Us" + "ers/ann'"]:
        assert hits(Source(path="a.md", text=path), PERSONAL), path
    for path in ["https://example.org/home/ann", "docs/work/a.md", "/var/lib/qmq", "GET /v1/send"]:
        assert not hits(Source(path="a.md", text=path), PERSONAL), path
    for text in ["https://pypi.example.org/simple", "pip install --index-url x", "UV_INDEX=x"]:
        assert hits(Source(path="a.md", text=text), INDEX), text
    assert not hits(Source(path="a.md", text="the key index, PIP, find links"), INDEX)
    draw = (
        '@pytest.mark.parametrize("seed", [1, random.SystemRandom().getrandbits(8)])\ndef f(): ...'
    )
    assert drawn_names(Source(path="a.py", text=draw)) == [
        "a.py:1 SystemRandom",
        "a.py:1 getrandbits",
    ]
    assert not drawn_names(
        Source(path="a.py", text=draw.replace("random.SystemRandom().getrandbits", "range"))
    )
