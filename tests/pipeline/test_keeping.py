"""Retention waits for an archive: told when files count and never before, by its name, at its own store."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from click.testing import CliRunner

from qmq_broker.storage.logs.actions import Acked
from qmq_client.commands.exit_codes import DONE, WRONG_CALL
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.cli import pipeline
from qmq_pipeline.errors import SourceError, UnreachableError
from qmq_pipeline.jobs.archive import NO_BROKER, Archived, archive
from qmq_pipeline.jobs.keeping import NOT_WANTED, UNKNOWN, Keeping
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.lake_files import LakeFiles
from qmq_pipeline.tables.schemas import ACTIONS, MESSAGES
from qmq_pipeline.work.ranges import TABLES_OF
from qmq_pipeline.work.workers import LocalWorkers
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.pipeline.power import Here, Synced
from tests.pipeline.quick import quick_environment
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, messages

SEGMENT = FORGETFUL.segment_bytes
ARCHIVE = (sys.executable, "-m", "qmq_client", "pipeline", "archive", "--quiet")
#: Nothing is old enough to go …
FOR_EVER = ("--retain-hours", "800000", "--reserve-bytes", "0")
#: … or everything is.
AT_ONCE = ("--retain-hours", "1", "--reserve-bytes", "0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some sealed segments of old messages that no group consumes."""
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 4000, subjects=("orders",)), frame_records=20)
    assert directory.store.durable_offset > 4 * SEGMENT
    directory.close()
    return directory.path


def keepers(broker: BrokerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{broker.url}/v1/keepers", timeout=DEADLINE_S).json()[
        "keepers"
    ]
    return found


def run(place: Place, folder: Path, keeping: Keeping | None = None) -> Archived:
    config = PipelineConfig(tables=str(folder), place=place)
    with LocalWorkers(1) as workers:
        return archive(workers, config, keeping=keeping)


def test_B12_retention_waits_for_the_archive_and_goes_as_far_as_it_has_come(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    with BrokerProcess(data, *FOR_EVER) as broker:
        register = Keeping(place=Place(broker_url=broker.url))
        store_id = run_store_id(data)
        assert register.tell(store_id, {})
        broker.stop()
    with BrokerProcess(data, *AT_ONCE) as broker:
        (keeper,) = keepers(broker)
        assert (keeper["name"], keeper["kept_offset"], keeper["lost_bytes"]) == ("archive", 0, 0)
        assert keeper["held_bytes"] > 0
        done = run(Place(broker_url=broker.url), folder)
        assert (done.keeper, done.not_waited_for) == ("archive", "")
        assert done.segments >= 4
        broker.wait_for("segments given up: ")
        (keeper,) = keepers(broker)
        sealed = done.next_offsets["commitlog"]
        assert (keeper["kept_offset"], keeper["lost_bytes"]) == (sealed, 0)
        assert run(Place(broker_url=broker.url), folder).segments == 0
    assert Lake(str(folder)).ranges(MESSAGES)[0].first == 0


def test_B12_an_archive_that_begins_late_is_no_second_one_of_its_name(
    data: Path, tmp_path: Path
) -> None:
    """Its first run ends before a segment is archived, and no segment of actions is whole for long."""
    with BrokerProcess(data, *AT_ONCE) as broker:
        broker.wait_for("segments given up: ")
    directory = DataDirectory(data, FORGETFUL)
    records = messages(MessageIds(2), 4000, subjects=("orders",))
    directory.append(records, frame_records=20, at_ms=START_MS + 60_000)
    begins = directory.store.first_offset
    assert begins > 0
    directory.close()
    with BrokerProcess(data, *FOR_EVER) as broker:
        place = Place(broker_url=broker.url)
        for _ in range(2):
            assert Keeping(place=place).tell(run_store_id(data), {})
        assert run(place, tmp_path / "archive").segments >= 4
        (keeper,) = keepers(broker)
        assert (keeper["kept_offset"] > begins, keeper["lost_bytes"]) == (True, 0)


def run_store_id(data: Path) -> str:
    content = (data / "FORMAT").read_text(encoding="utf-8").splitlines()[0]
    store_id: str = json.loads(content)["store_id"]
    return store_id


@pytest.mark.parametrize("died", ["before", "behind"])
def test_B12_whoever_is_killed_around_telling_has_told_no_more_than_counts(
    data: Path, tmp_path: Path, died: str
) -> None:
    folder = tmp_path / "archive"
    lake = Lake(str(folder))
    with BrokerProcess(data, *FOR_EVER) as broker:
        with killing_at(broker, told=2, is_before=died == "before") as (url, watch):
            process = subprocess.Popen(
                [*ARCHIVE, "--tables", str(folder), "--path", str(data), "--broker", url],
                env=quick_environment(),
            )
            watch(process)
            assert process.wait(100) == -signal.SIGKILL
        (keeper,) = keepers(broker)
        committed = lake.ranges(MESSAGES)[-1].next
        assert committed >= 4 * SEGMENT
        assert keeper["kept_offset"] == (0 if died == "before" else committed)
        done = run(Place(broker_url=broker.url), folder)
        assert done.segments == 0
        (keeper,) = keepers(broker)
        assert keeper["kept_offset"] == committed


@contextmanager
def killing_at(
    broker: BrokerProcess, *, told: int, is_before: bool
) -> Iterator[tuple[str, Callable[[subprocess.Popen[bytes]], None]]]:
    """A way to the broker on which the process that tells for this many times is killed then."""
    watched: list[subprocess.Popen[bytes]] = []
    is_watched = threading.Event()
    count = [0]

    def kill() -> None:
        assert is_watched.wait(60)
        watched[0].kill()
        watched[0].wait(60)

    def on_post(way: Way, body: bytes) -> None:
        count[0] += 1
        is_last = count[0] == told
        if is_last and is_before:
            kill()
            return
        answer = httpx.post(f"{broker.url}{way.path}", content=body, timeout=DEADLINE_S)
        if is_last:
            kill()
            return
        way.answer(answer.status_code, answer.content)

    def watch(process: subprocess.Popen[bytes]) -> None:
        watched.append(process)
        is_watched.set()

    with a_way_to(broker, on_post) as url:
        yield url, watch


class Way(BaseHTTPRequestHandler):
    """Hands questions on to a broker; what is posted is the test's affair."""

    broker: ClassVar[BrokerProcess]
    on_post: ClassVar[Callable[[Way, bytes], None]]

    def do_GET(self) -> None:
        answer = httpx.get(f"{self.broker.url}{self.path}", timeout=DEADLINE_S)
        self.answer(answer.status_code, answer.content)

    def do_POST(self) -> None:
        type(self).on_post(self, self.rfile.read(int(self.headers["content-length"])))

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is to be said."""


@contextmanager
def a_way_to(broker: BrokerProcess, on_post: Callable[[Way, bytes], None]) -> Iterator[str]:
    kind = type("ThisWay", (Way,), {"broker": broker, "on_post": on_post})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


@pytest.mark.parametrize("is_first", [True, False])
def test_B12_what_a_broker_is_told_of_survives_a_power_cut(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    folder = tmp_path / "on the way" / "archive"
    config = PipelineConfig(tables=str(folder), place=Place(path=str(data)))
    synced = Synced(monkeypatch)
    if not is_first:  # the run before was killed when it had committed, and before it synced that
        sync_names = LakeFiles.sync_names

        def but_of_commits(files: LakeFiles, paths: Iterable[str]) -> None:
            sync_names(files, (one for one in paths if not one.endswith(".json")))

        with monkeypatch.context() as other:
            other.setattr(LakeFiles, "sync_names", but_of_commits)
            archive(Here(1), config)
    told: list[int] = []

    class Watched(Keeping):
        def tell(self, store_id: str, kept: Mapping[str, int]) -> bool:
            for log, offset in kept.items():
                left = tmp_path / f"left {len(told)}"
                synced.left(tmp_path, left)
                lake, table = Lake(str(left / "on the way" / "archive")), TABLES_OF[log][0]
                lake.require()
                assert lake.ranges(table)[-1].next == offset
                for one in TABLES_OF[log]:
                    files = [file for facts in lake.ranges(one) for file in facts.files]
                    rows = [
                        batch.num_rows
                        for f in files
                        for batch in lake.read_file(one, f.path, one.key)
                    ]
                    assert sum(rows) == sum(file.rows for file in files)
                told.append(offset)
            return True

    done = archive(Here(1), config, keeping=Watched(place=None))
    assert told[-1] == done.next_offsets["commitlog"] >= 4 * SEGMENT


def test_two_archives_may_not_have_one_name_and_the_second_is_told_so(
    data: Path, tmp_path: Path
) -> None:
    with BrokerProcess(data, *FOR_EVER) as broker:
        place = Place(broker_url=broker.url)
        run(place, tmp_path / "one")
        with pytest.raises(SourceError, match="keeper archive has told before") as raised:
            run(place, tmp_path / "two")
        assert "give this one a name of its own" in str(raised.value)
        assert str(raised.value).count("Two archives may not have one name") == 1
        done = run(place, tmp_path / "two", Keeping(place=place, name="second"))
        assert done.keeper == "second"
        assert [one["name"] for one in keepers(broker)] == ["archive", "second"]


def test_a_broker_of_another_store_is_not_told(data: Path, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "other", *FOR_EVER) as broker:
        keeping = Keeping(place=Place(broker_url=broker.url))
        with pytest.raises(SourceError, match="store_id"):
            run(Place(path=str(data)), tmp_path / "archive", keeping)
        assert keepers(broker) == []


@pytest.mark.parametrize("reads", ["the broker", "the directory"])
def test_B12_a_broker_whose_log_is_another_one_than_the_archived_is_not_told(
    data: Path, tmp_path: Path, reads: str
) -> None:
    """Restored from a backup it goes on differently: what it has there is not in the archive."""
    restored = tmp_path / "restored"
    shutil.copytree(data, restored)
    for path, number in ((data, 2), (restored, 3)):
        directory = DataDirectory(path, FORGETFUL)
        records = messages(MessageIds(number), 4000, subjects=("orders",))
        directory.append(records, frame_records=20, at_ms=START_MS + number * 60_000)
        directory.close()
    folder = tmp_path / "archive"
    assert run(Place(path=str(data)), folder).segments >= 8
    with BrokerProcess(restored, *FOR_EVER) as broker:
        there = Place(broker_url=broker.url)
        place = there if reads == "the broker" else Place(path=str(data))
        with pytest.raises(SourceError, match="is not the one that was archived") as raised:
            run(place, folder, Keeping(place=there))
        assert broker.url in str(raised.value)
        assert keepers(broker) == []
        if reads == "the directory":
            with pytest.raises(SourceError, match="is not the one that was archived"):
                run(place, tmp_path / "new", Keeping(place=there))
            assert [one["kept_offset"] for one in keepers(broker)] == [0]


def test_a_broker_that_does_not_know_keepers_is_archived_with_a_word_about_it(
    data: Path, tmp_path: Path
) -> None:
    def on_post(way: Way, _: bytes) -> None:
        refused = {"code": "unknown_path", "message": "there is nothing at this path"}
        way.answer(404, json.dumps(refused).encode())

    with BrokerProcess(data, *FOR_EVER) as broker, a_way_to(broker, on_post) as url:
        done = run(Place(broker_url=url), tmp_path / "archive")
    assert (done.keeper, done.not_waited_for) == (None, UNKNOWN)
    assert done.segments >= 4


def test_without_a_broker_that_answers_nothing_is_archived_and_without_one_retention_does_not_wait(
    data: Path, tmp_path: Path
) -> None:
    nobody = Keeping(place=Place(broker_url="http://127.0.0.1:1", wait_s=0))
    with pytest.raises(UnreachableError):
        run(Place(path=str(data)), tmp_path / "archive", nobody)
    done = run(Place(path=str(data)), tmp_path / "archive")
    assert (done.keeper, done.not_waited_for) == (None, NO_BROKER)
    assert done.segments >= 4


def test_the_command_says_whether_retention_waits(data: Path, tmp_path: Path) -> None:
    def called(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(pipeline, ["archive", "--quiet", *arguments])
        return done.exit_code, done.output

    tables, here = ("--tables", str(tmp_path / "archive")), ("--path", str(data))
    with BrokerProcess(data, *FOR_EVER) as broker:
        there = ("--broker", broker.url)
        code, said = called(*tables, *here, *there)
        assert (code, "retention waits for keeper archive" in said) == (DONE, True), said
        code, said = called(*tables, *there, "--json")
        assert json.loads(said)["keeper"] == "archive"
        code, said = called(*tables, *here)
        assert (code, f"retention does not wait: {NO_BROKER}" in said) == (DONE, True), said
        code, said = called(*tables, *there, "--no-keeper")
        assert (code, f"retention does not wait: {NOT_WANTED}" in said) == (DONE, True), said
        code, said = called(*tables, *there, "--no-keeper", "--keeper", "mine")
        assert (code, "give one" in said) == (WRONG_CALL, True), said
        code, said = called(*tables, *there, "--keeper", "no/name")
        assert (code, "name" in said) == (WRONG_CALL, True), said
        assert [one["name"] for one in keepers(broker)] == ["archive"]


def test_actions_that_went_before_they_were_archived_leave_a_gap_and_the_archive_goes_on(
    tmp_path: Path,
) -> None:
    options = replace(FORGETFUL, action_segment_bytes=4096)
    directory = DataDirectory(tmp_path / "broker", options)
    place, folder = Place(path=str(directory.path)), tmp_path / "archive"
    ends = []
    for _ in range(3):
        for number in range(200):
            directory.act([Acked(START_MS, "orders", "billing", "one", number, number + 1)])
        ends.append(run(place, folder).next_offsets["actionlog"])
        for _ in range(3):
            actions = directory.store.actions
            actions.write_snapshot(actions.log.written_offset, b"")
        for number in range(200):
            directory.act([Acked(START_MS, "orders", "billing", "one", number, number + 1)])
        actions.write_snapshot(actions.log.written_offset, b"")
        actions.write_snapshot(actions.log.written_offset, b"")
    directory.close()
    assert 0 < ends[0] < ends[1] < ends[2]
    ranges = Lake(str(folder)).ranges(ACTIONS)
    assert any(one.next < other.first for one, other in pairwise(ranges)), "there is a gap"
