"""Writing and reading histories: what is written survives a kill, what is torn is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.events import Acked, Attempt, Commit, Fault, Started, Torn
from tests.kit.history import History, HistoryDamagedError, body_hash, read_histories

ROOT = Path(__file__).parents[2]


def test_events_come_back_as_they_were_written_with_the_name_of_their_process(
    tmp_path: Path,
) -> None:
    with History.open(tmp_path, "app") as history:
        attempt = Attempt(message_id="m1", subject="s", body_hash="h", transaction_id="t", key="k")
        acked = Acked(group="g", consumer="c", message_id="m1", attempt=2, began_ns=5)
        history.write(attempt, acked)
    started, *others = read_histories(tmp_path)
    assert isinstance(started, Started)
    assert started.pid == os.getpid()
    assert [event.process for event in others] == ["app", "app"]
    expected = (
        Attempt(
            at_ns=attempt.at_ns,
            process="app",
            message_id="m1",
            subject="s",
            body_hash="h",
            transaction_id="t",
            key="k",
        ),
        Acked(
            at_ns=acked.at_ns,
            process="app",
            group="g",
            consumer="c",
            message_id="m1",
            attempt=2,
            began_ns=5,
        ),
    )
    assert tuple(others) == expected


def test_histories_are_merged_by_time(tmp_path: Path) -> None:
    with History.open(tmp_path, "a") as first, History.open(tmp_path, "b") as second:
        second.write(Commit(at_ns=30, transaction_id="3"), Commit(at_ns=10, transaction_id="1"))
        first.write(Commit(at_ns=20, transaction_id="2"))
    commits = [event for event in read_histories(tmp_path) if isinstance(event, Commit)]
    assert [(event.transaction_id, event.process) for event in commits] == [
        ("1", "b"),
        ("2", "a"),
        ("3", "b"),
    ]


def test_keys_are_small(tmp_path: Path) -> None:
    with History.open(tmp_path, "a") as history:
        history.write(Fault(at_ns=7, kind="crash", target="broker", phase="begin"))
    line = (tmp_path / "a.jsonl").read_text().splitlines()[1]
    assert line == '{"e":"fault","t":7,"kind":"crash","target":"broker","phase":"begin"}'


def test_a_torn_last_line_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    with History.open(tmp_path, "a") as history:
        history.write(Commit(transaction_id="1"), Commit(transaction_id="2"))
    path = tmp_path / "a.jsonl"
    whole = path.read_bytes()
    last_line_bytes = len(whole.splitlines(keepends=True)[-1])
    for cut_bytes in range(1, last_line_bytes):
        path.write_bytes(whole[:-cut_bytes])
        started, commit, torn = read_histories(tmp_path)
        assert isinstance(started, Started)
        assert isinstance(commit, Commit)
        assert isinstance(torn, Torn)
        assert (torn.process, torn.size_bytes) == ("a", last_line_bytes - cut_bytes)


def test_a_process_that_comes_back_appends_after_its_torn_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"e":"started","t":1,"pid":1}\n{"e":"comm')
    with History.open(tmp_path, "a") as history:
        history.write(Commit(transaction_id="2"))
    kinds = [type(event) for event in read_histories(tmp_path)]
    assert kinds == [Started, Torn, Started, Commit]


def test_a_process_that_stopped_in_order_and_comes_back_leaves_no_torn_line(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        with History.open(tmp_path, "a") as history:
            history.close()
    assert [type(event) for event in read_histories(tmp_path)] == [Started, Started]


def test_damage_that_no_kill_explains_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'rubbish\n{"e":"commit","t":1,"x":"1"}\n')
    with pytest.raises(HistoryDamagedError, match="line 1"):
        read_histories(tmp_path)


def test_an_event_of_unknown_kind_or_field_is_damage_not_noise(tmp_path: Path) -> None:
    for line in (b'{"e":"comit","t":1,"x":"1"}\n', b'{"e":"commit","t":1,"x":"1","y":2}\n'):
        (tmp_path / "a.jsonl").write_bytes(line + b'{"e":"heal","t":2}\n')
        with pytest.raises(HistoryDamagedError):
            read_histories(tmp_path)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a\n"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a process name"):
        History.open(tmp_path, name)


def test_whatever_write_returned_for_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.kit.events import Commit\n"
        "from tests.kit.history import History\n"
        "history = History.open(Path(sys.argv[1]), 'victim')\n"
        "for number in range(100):\n"
        "    history.write(Commit(transaction_id=str(number)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False, timeout=60
    )
    assert outcome.returncode == -signal.SIGKILL
    commits = [event for event in read_histories(tmp_path) if isinstance(event, Commit)]
    assert [event.transaction_id for event in commits] == [str(number) for number in range(100)]


def test_the_kit_is_importable_without_pytest() -> None:
    program = (
        "import sys\n"
        "import tests.kit.checker, tests.kit.history\n"
        "assert 'pytest' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_the_hash_covers_body_and_headers() -> None:
    hashes = {
        body_hash(b"body"),
        body_hash(b"bodY"),
        body_hash(b"body", {"a": "1"}),
        body_hash(b"body", {"a": "2"}),
    }
    assert len(hashes) == 4
    assert body_hash(b"body", {"a": "1", "b": "2"}) == body_hash(b"body", {"b": "2", "a": "1"})
    assert body_hash(b"body", {}) == body_hash(b"body")
