"""`qmq store` as people call it: on real files, beside a real broker."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from qmq_broker.face.commands.store import DUMPED, MENDED_AT_START, end_with_parent, store
from qmq_broker.face.commands.store_dump import KINDS
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.store import Store
from qmq_client.group.actions import GroupDefined
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.record import BodyKind
from tests.broker.face.test_process import HEADERS, pull_all
from tests.broker.service.rig import make_frame, new_ids
from tests.crash.recording_disk import RecordingDisk
from tests.crash.world import OPTIONS, World
from tests.crash.world import make_frame as frame_of
from tests.kit.broker_process import BrokerProcess
from tests.kit.clock import FakeClock
from tests.kit.waiting import DEADLINE_S


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(store, [str(argument) for argument in arguments])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A directory that was stopped in order, with three segments and a group."""
    directory = tmp_path / "data"
    clock = FakeClock()
    opened = Store.open(OsDisk(str(directory)), clock, OPTIONS)
    ids = World(RecordingDisk()).ids
    for _ in range(12):
        opened.append([frame_of(ids, {"orders": [60, 20], "Invoices": 30})])
        opened.commit_and_step()
    opened.actions.append([GroupDefined(1, "orders", "billing", 0, 16)])
    opened.close()
    return directory


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def test_verify_says_all_is_well_in_a_few_lines(data: Path) -> None:
    result = run("verify", data)
    assert result.exit_code == ExitCode.OK
    assert "12 frames with 36 records" in result.output
    assert (
        "2 subjects, 36 messages, stopped in order, epoch 1 (one more with each start)"
        in result.output
    )
    assert "all is well" in result.output


def test_verify_ends_with_the_code_of_the_worst_fault(data: Path) -> None:
    flip(data / "CLEAN", 3)
    assert run("verify", data).exit_code == ExitCode.OK
    flip(data / "consumequeue" / "orders" / f"{0:020d}", 3)
    result = run("verify", data)
    assert result.exit_code == MENDED_AT_START
    assert "rebuilt: consumequeue/orders" in result.output
    flip(data / "commitlog" / f"{0:020d}", 500)
    result = run("verify", data, "--json")
    assert result.exit_code == ExitCode.CORRUPTION
    levels = [fault["level"] for fault in json.loads(result.output)["faults"]]
    assert levels[0] == "damaged"
    assert levels[-1] == "ignored"


def test_verify_reads_with_several_processes_what_one_reads(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(data / "commitlog" / f"{0:020d}", 500)
    alone = json.loads(run("verify", data, "--json", "--workers", "1").output)
    monkeypatch.setattr("qmq_broker.face.commands.store.ALONE_BYTES_MAX", 0)
    began_with: list[object] = []

    class Watched(ProcessPoolExecutor):
        def __init__(self, *args: Any, **named: Any) -> None:
            began_with.append(named["initializer"])
            super().__init__(*args, **named)

    monkeypatch.setattr("qmq_broker.face.commands.store.ProcessPoolExecutor", Watched)
    shared = json.loads(run("verify", data, "--json", "--workers", "2").output)
    assert began_with == [end_with_parent], "a verification that is killed leaves none of them"
    for found in (alone, shared):
        del found["duration_ms"]
    assert shared == alone


def test_verify_and_rebuild_leave_a_running_broker_alone(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        for command in ("verify", "rebuild"):
            result = run(command, tmp_path / "data")
            assert result.exit_code == ExitCode.DIRECTORY
            assert "in use by pid" in result.output
        assert process.stop() == ExitCode.OK
    assert run("verify", tmp_path / "data").exit_code == ExitCode.OK


def test_what_is_no_directory_is_wrong_usage_and_is_not_made(tmp_path: Path) -> None:
    assert run("verify", tmp_path / "none").exit_code == ExitCode.USAGE
    assert not (tmp_path / "none").exists()
    assert run("verify", tmp_path).exit_code == ExitCode.DIRECTORY
    assert run("dump", "frames", tmp_path).exit_code == ExitCode.DIRECTORY


def test_dump_offers_the_kinds_that_it_knows() -> None:
    assert set(DUMPED) == set(KINDS)


@pytest.mark.parametrize("kind", DUMPED)
def test_dump_shows_every_kind_of_file_as_rows(data: Path, kind: str) -> None:
    lines = run("dump", kind, data, "--json").output.splitlines()
    rows = [json.loads(line) for line in lines]
    counts = {
        "actions": 2,
        "checkpoint": 2,
        "clean": 1,
        "entries": 36,
        "format": 1,
        "queues": 2,
        "records": 37,
        "retained": 1,
        "segments": 4,
        "snapshot": 0,
        "summaries": 0,
    }
    assert len(rows) == counts.get(kind, len(rows))
    assert len(run("dump", kind, data).output.splitlines()) == len(rows)
    assert all(isinstance(row, dict) for row in rows)


def test_dump_prints_ids_of_the_store_and_of_segments_in_hexadecimal(data: Path) -> None:
    opened = Store.open(OsDisk(str(data)), FakeClock(), OPTIONS)
    while opened.step() or opened.summaries.step(1 << 20):
        pass
    opened.close()
    (format_,) = (json.loads(line) for line in run("dump", "format", data, "--json").output.split())
    rows = [
        json.loads(line)
        for line in run("dump", "summaries", data, "--json").output.split("\n")[:-1]
    ]
    assert rows
    for row in rows:
        assert row["store_id"] == format_["store_id"]
        assert len(bytes.fromhex(row["identity"])) == 8


def test_dump_shows_bodies_of_every_kind_one_message_a_line(tmp_path: Path) -> None:
    bodies = [
        (BodyKind.JSON, b'{"number": 17,\n "paid": true}', {"number": 17, "paid": True}),
        (BodyKind.TEXT, b"two\nlines\x1b[2J", "two\nlines\x1b[2J"),
        (BodyKind.BYTES, b"\xff", None),
    ]
    opened = Store.open(OsDisk(str(tmp_path / "data")), FakeClock(), OPTIONS)
    for kind, body, _ in bodies:
        frame = make_frame([body], body_kind=kind)
        opened.append([parse_message_frame(frame)])
    opened.commit_and_step()
    opened.close()
    lines = run("dump", "records", tmp_path / "data", "--json", "--limit", "3").output.splitlines()
    assert [json.loads(line).get("body") for line in lines] == [body for _, _, body in bodies]
    shown = run("dump", "records", tmp_path / "data", "--limit", "3").output
    assert len(shown.splitlines()) == 3
    assert 'body={"number":17,"paid":true}' in shown
    assert "body=two\\nlines\\x1b[2J" in shown


def test_dump_finds_its_way_from_any_offset_for_one_subject(data: Path) -> None:
    everything = run("dump", "records", data, "--json", "--subject", "Invoices").output
    rows = [row for row in map(json.loads, everything.splitlines()) if "sequence" in row]
    assert [row["sequence"] for row in rows] == list(range(12))
    later = run("dump", "records", data, "--json", "--from", "2500", "--limit", "1").output
    first = json.loads(later)
    assert 2500 <= first["offset"] < 3300
    entry = run(
        "dump", "entries", data, "--subject", "orders", "--from", "5", "--limit", "1"
    ).output
    assert entry.startswith("subject=orders  sequence=5  offset=")


def test_dump_tells_room_that_was_never_used_from_damage(data: Path) -> None:
    for kind, log in (("frames", "commitlog"), ("actions", "actionlog")):
        rows = [json.loads(line) for line in run("dump", kind, data, "--json").output.splitlines()]
        assert not [row for row in rows if "unreadable" in row]
        assert rows[-1]["unused"] == "preallocated space"
        last = sorted((data / log).glob("0*"))[-1]
        content = bytearray(last.read_bytes())
        position = rows[-1]["first"] % len(content)
        content[position - 20] ^= 1
        last.write_bytes(content)
        rows = [json.loads(line) for line in run("dump", kind, data, "--json").output.splitlines()]
        assert "unreadable" in rows[-1], "the last frame is damaged"


def test_dump_continues_behind_damage(data: Path) -> None:
    flip(data / "commitlog" / f"{0:020d}", 500)
    rows = [json.loads(line) for line in run("dump", "frames", data, "--json").output.splitlines()]
    unreadable = [row for row in rows if "unreadable" in row]
    assert unreadable[0]["next"] > unreadable[0]["first"] > 0
    assert len([row for row in rows if row.get("kind") == "MESSAGES"]) == 11


def test_dump_shows_entries_behind_those_that_are_missing(data: Path) -> None:
    """Queues are derived: what is missing there is no damage of accepted data."""
    for path in (data / "consumequeue" / "orders").iterdir():
        path.unlink()
    (data / "summary" / "Not ours").mkdir()
    for kind in ("entries", "summaries"):
        result = run("dump", kind, data, "--json")
        assert result.exit_code == ExitCode.OK, result.output
    rows = [json.loads(line) for line in run("dump", "entries", data, "--json").output.splitlines()]
    files = {row["file"].rpartition("/")[0] for row in rows if "unreadable" in row}
    assert files == {"consumequeue/orders"}
    assert [row["sequence"] for row in rows if "subject" in row] == list(range(12))


def test_rebuild_makes_the_queues_again(data: Path) -> None:
    queue = data / "consumequeue" / "orders" / f"{0:020d}"
    before = queue.read_bytes()
    queue.unlink()
    result = run("rebuild", data, "all")
    assert result.exit_code == ExitCode.OK
    assert "36 entries of 2 subjects" in result.output
    assert queue.read_bytes() == before
    assert run("verify", data).exit_code == ExitCode.OK


def test_X3_a_backup_beside_a_running_broker_has_all_that_was_acknowledged(tmp_path: Path) -> None:
    """While another thread sends; then the copy is restored and served."""
    sent = 0
    enough, stop = threading.Event(), threading.Event()

    def send_on(url: str) -> None:
        nonlocal sent
        ids = new_ids()
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
            while not stop.is_set():
                frame = make_frame([b"%d" % sent, b"more"], ids=ids)
                assert client.post("/v1/send", content=frame, headers=HEADERS).status_code == 200
                sent += 2
                if sent >= 40:
                    enough.set()

    with BrokerProcess(tmp_path / "data") as process:
        thread = threading.Thread(target=send_on, args=(process.url,))
        thread.start()
        assert enough.wait(30)
        acknowledged = sent
        result = run("backup", tmp_path / "data", tmp_path / "copy")
        stop.set()
        thread.join(30)
        assert process.stop() == ExitCode.OK
    assert result.exit_code == ExitCode.OK, result.output
    assert run("restore", tmp_path / "copy", tmp_path / "restored").exit_code == ExitCode.OK
    with (
        BrokerProcess(tmp_path / "restored") as process,
        httpx.Client(base_url=process.url, timeout=DEADLINE_S) as client,
    ):
        found = pull_all(client)
        assert acknowledged <= len(found) <= sent
        assert found == sorted(found)


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_a_copy_into_the_directory_itself_is_refused(
    data: Path, tmp_path: Path, command: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(data)
    before = sorted(data.rglob("*"))
    for target in (data / "inside", link / "a" / "b"):
        result = run(command, data, target)
        assert result.exit_code == ExitCode.DIRECTORY, result.output
        assert "inside" in result.output
    assert sorted(data.rglob("*")) == before
    assert run(command, data, tmp_path / "data-2").exit_code == ExitCode.OK


def test_X3_a_half_made_or_damaged_backup_is_not_restored(data: Path, tmp_path: Path) -> None:
    assert run("backup", data, tmp_path / "copy", "--copy").exit_code == ExitCode.OK
    flip(tmp_path / "copy" / "commitlog" / f"{2048:020d}", 100)
    result = run("restore", tmp_path / "copy", tmp_path / "restored")
    assert result.exit_code == ExitCode.CORRUPTION
    assert not (tmp_path / "restored").exists()
    (tmp_path / "copy" / "FORMAT").unlink()
    assert run("restore", tmp_path / "copy", tmp_path / "restored").exit_code == ExitCode.CORRUPTION
    result = run("backup", data, tmp_path / "copy")
    assert result.exit_code == ExitCode.DIRECTORY
    assert f"{tmp_path / 'copy'} is unfinished: remove it" in result.output


def test_a_copy_that_fails_is_said_to_be_unfinished_and_a_whole_one_never(
    data: Path, tmp_path: Path
) -> None:
    (data / "actionlog" / f"{0:020d}").rename(tmp_path / "elsewhere")
    (data / "actionlog" / f"{0:020d}").mkdir()
    copy = tmp_path / "copy"
    result = run("backup", data, copy)
    assert result.exit_code == ExitCode.POISONED
    assert f"{copy} is unfinished: remove it" in result.output
    shutil.rmtree(copy)
    (data / "actionlog" / f"{0:020d}").rmdir()
    (tmp_path / "elsewhere").rename(data / "actionlog" / f"{0:020d}")
    assert run("backup", data, copy).exit_code == ExitCode.OK
    result = run("backup", data, copy)
    assert result.exit_code == ExitCode.DIRECTORY
    assert "unfinished" not in result.output


def test_the_commands_of_the_page_run_as_they_stand(data: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "store.md").read_text()
    commands = [line[2:] for line in page.splitlines() if line.startswith("$ ")]
    assert len(commands) == 5
    for command in commands:
        words = command.split()
        assert words[:2] == ["qmq", "store"]
        there = {"/var/lib/qmq": str(data)}
        arguments = [
            there.get(word, str(tmp_path / word[1:].replace("/", "-")) if word[0] == "/" else word)
            for word in words[2:]
        ]
        result = run(*arguments)
        assert result.exit_code == ExitCode.OK, (command, result.output)


def test_the_page_names_every_kind_and_exit_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "store.md").read_text()
    assert all(f"`{kind}`" in page for kind in DUMPED)
    codes = {
        int(line.split("|")[1])
        for line in page.splitlines()
        if line[:3] in {f"| {n}" for n in range(6)}
    }
    assert codes == {code.value for code in ExitCode if code is not ExitCode.ADDRESS}
