"""Rights, tokens and their file, without a broker."""

from __future__ import annotations

import hmac
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from qmq_broker.face.authentication import tokens as tokens_module
from qmq_broker.face.authentication.access import (
    ANYBODY,
    UNIDENTIFIED,
    Caller,
    Right,
    Role,
    parse_right,
)
from qmq_broker.face.authentication.token_file import (
    TokenFileError,
    WatchedTokens,
    change_tokens,
    read_tokens,
)
from qmq_broker.face.authentication.tokens import (
    TokenEntry,
    TokenList,
    Tokens,
    digest_of,
    encode_tokens,
    new_token,
)
from qmq_broker.storage.files.disk import OsDisk

NOW_MS = 1_700_000_000_000
RIGHTS = (Right(role=Role.PRODUCER, subjects="orders.*"),)


def entry(text: str, token_id: str, **more: Any) -> TokenEntry:
    fields: dict[str, Any] = {
        "name": "shop",
        "rights": RIGHTS,
        "digest": digest_of(text).hex(),
        **more,
    }
    return TokenEntry(id=token_id, **fields)


@pytest.mark.parametrize(
    ("right", "covered", "not_covered"),
    [
        ("orders", ["orders"], ["orders.eu", "order", "Orders", "*", ""]),
        ("orders.*", ["orders.", "orders.eu", "orders.eu.paid"], ["orders", "orders2", "*", ""]),
        ("orders*", ["orders", "orders2", "orders.eu"], ["order", "xorders", "*"]),
        ("*", ["orders", "_", "*"], []),
    ],
)
def test_a_right_covers_one_name_or_the_beginning_of_names_or_all(
    right: str, covered: list[str], not_covered: list[str]
) -> None:
    caller = Caller("a", [parse_right(f"consumer:{right}")])
    assert [name for name in covered if not caller.may([Role.CONSUMER], name)] == []
    assert [name for name in not_covered if caller.may([Role.CONSUMER], name)] == []


def test_a_role_is_only_itself_and_an_admin_is_all_of_them() -> None:
    for role in Role:
        caller = Caller("a", [Right(role=role, subjects="a")])
        may = [one for one in Role if caller.may([one], "a")]
        assert may == (list(Role) if role is Role.ADMIN else [role])
    assert not any(UNIDENTIFIED.may([role], "a") for role in Role)
    assert all(ANYBODY.may([role], "*") for role in Role)


@pytest.mark.parametrize(
    "text", ["", "root", "producer:", "producer:.*", "producer:a*b", "admin:**", "consumer:../x"]
)
def test_a_right_that_says_nothing_or_is_a_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give"):
        parse_right(text)


def test_a_token_has_256_bits_of_its_own_and_only_its_hash_is_kept() -> None:
    (first_id, first), (second_id, second) = new_token(), new_token()
    assert first_id in first
    assert first_id != second_id
    assert len(first.removeprefix(f"qmq_{first_id}_")) * 4 == 256
    assert first[-64:] not in str(entry(first, first_id))
    found = Tokens([entry(first, first_id)])
    assert found.find(first, NOW_MS) is not None
    assert found.find(second, NOW_MS) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1] + ("0" if text[-1] != "0" else "1"),
        lambda text: text + "0",
        lambda text: text[:-1],
        lambda text: text.upper(),
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: text.replace("qmq_", "qmq_0000"),
        lambda _: "",
        lambda _: "qmq_",
        lambda _: "é" * 86,
        lambda _: "\udcff" * 86,
    ],
)
def test_what_is_not_the_token_to_the_last_character_is_nobody(change: object) -> None:
    token_id, text = new_token()
    assert callable(change)
    assert Tokens([entry(text, token_id)]).find(change(text), NOW_MS) is None


def test_a_token_counts_until_its_end_and_not_beyond() -> None:
    token_id, text = new_token()
    found = Tokens([entry(text, token_id, ends_at_ms=NOW_MS)])
    assert found.find(text, NOW_MS - 1) is not None
    assert found.find(text, NOW_MS) is None


def test_every_guess_costs_one_hash_and_one_comparison_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_id, text = new_token()
    found = Tokens([entry(text, token_id)])
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    class Counted:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(tokens_module, "hmac", Counted)
    for guess in (text, text[:-1] + "x", new_token()[1], "nonsense", ""):
        found.find(guess, NOW_MS)
    assert compared == [(32, 32)] * 5


def test_the_file_is_for_its_owner_and_one_command_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token_id, text = new_token()
    change_tokens(str(path), lambda _: TokenList(tokens=(entry(text, token_id),)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert text[-64:] not in path.read_text()
    disk = OsDisk(str(tmp_path))
    lock = disk.lock("tokens.json.lock", "somebody")
    with pytest.raises(TokenFileError, match="another command"):
        change_tokens(str(path), lambda known: known)
    lock.release()
    disk.close()
    assert [one.id for one in read_tokens(str(path)).tokens] == [token_id]


def write(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


GOOD: dict[str, object] = {
    "id": "0123456789abcdef",
    "name": "a",
    "rights": [{"role": "admin"}],
    "digest": "0" * 64,
}


def listed(*entries: dict[str, object]) -> str:
    return json.dumps({"version": 1, "tokens": entries})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "{}x",
        '{"version":1}',
        '{"tokens":[]}',
        '{"version":2,"tokens":[]}',
        '{"tokens":[],"more":1}',
        '{"tokens":[{"id":"x"}]}',
        listed(GOOD, GOOD),
        listed({**GOOD, "digest": ""}),
        listed({**GOOD, "certificate": "both"}),
        listed({**GOOD, "rights": []}),
        listed({**GOOD, "rights": [{"role": "root"}]}),
        listed({**GOOD, "rights": [{"role": "admin", "subjects": "../*"}]}),
        listed({**GOOD, "name": "a\nb"}),
        listed({**GOOD, "secret": "x"}),
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_refused_at_the_start_and_leaves_the_tokens_later(
    tmp_path: Path, content: bytes | str
) -> None:
    path = tmp_path / "tokens.json"
    write(path, content)
    with pytest.raises(TokenFileError):
        WatchedTokens(str(path))
    token_id, text = new_token()
    path.unlink()
    change_tokens(str(path), lambda _: TokenList(tokens=(entry(text, token_id),)))
    watched = WatchedTokens(str(path))
    write(path, content)
    assert not watched.step()
    assert watched.current.find(text, NOW_MS) is not None


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "writable"])
def test_what_is_no_file_of_the_operator_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.json"
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "writable":
            path.write_text('{"version":1,"tokens":[]}')
            path.chmod(0o666)
    with pytest.raises(TokenFileError):
        WatchedTokens(str(path))


def test_a_file_that_vanishes_opens_no_door(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token_id, text = new_token()
    change_tokens(str(path), lambda _: TokenList(tokens=(entry(text, token_id),)))
    watched = WatchedTokens(str(path))
    assert not watched.step()
    path.unlink()
    assert not watched.step()
    assert watched.current.find(text, NOW_MS) is not None
    change_tokens(str(path), lambda _: TokenList())
    assert watched.step()
    assert watched.current.find(text, NOW_MS) is None


def test_a_file_whose_rights_were_mended_as_the_log_says_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token_id, text = new_token()
    change_tokens(str(path), lambda _: TokenList(tokens=(entry(text, token_id),)))
    watched = WatchedTokens(str(path))
    draft = tmp_path / "draft"
    write(draft, encode_tokens(TokenList()))
    draft.chmod(0o666)
    draft.rename(path)
    assert not watched.step()
    path.chmod(0o600)
    assert watched.step()
    assert watched.current.find(text, NOW_MS) is None
