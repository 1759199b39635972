"""What a broker is told of an archive: by its name, at its own store, and only of the log that was archived."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from qmq_client.commands.exit_codes import WRONG_CALL
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.cli import pipeline
from qmq_pipeline.errors import SourceError, UnreachableError
from qmq_pipeline.jobs.archive import check_same
from qmq_pipeline.jobs.keeping import NOT_WANTED, UNKNOWN, Keeping, keeping_of
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log
from qmq_pipeline.sources.positions import position
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.pipeline.world import FORGETFUL, START_MS, DataDirectory, messages

#: Nothing is old enough to go.
FOREVER = ("--retain-hours", "800000", "--reserve-bytes", "0")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = DataDirectory(tmp_path / "broker", FORGETFUL)
    directory.append(messages(MessageIds(1), 3000, subjects=("orders",)), frame_records=20)
    directory.close()
    return directory.path


def store_id(data: Path) -> str:
    found: str = json.loads((data / "FORMAT").read_text(encoding="utf-8").splitlines()[0])[
        "store_id"
    ]
    return found


def keepers(broker: BrokerProcess) -> dict[str, int]:
    answer = httpx.get(f"{broker.url}/v1/keepers", timeout=DEADLINE_S)
    return {one["name"]: one["kept_offset"] for one in answer.json()["keepers"]}


def test_two_archives_may_not_have_one_name_and_the_second_is_told_so(data: Path) -> None:
    kept = {COMMIT_LOG: FORGETFUL.segment_bytes, ACTION_LOG: 0}
    with BrokerProcess(data, *FOREVER) as broker:
        place = Place(broker_url=broker.url)
        first = Keeping(place=place)
        assert first.report(store_id(data), {})
        assert first.report(store_id(data), kept)
        with pytest.raises(SourceError, match="keeper archive has reported before") as raised:
            Keeping(place=place).report(store_id(data), {COMMIT_LOG: 1})
        assert "give this one another name" in str(raised.value)
        assert Keeping(place=place, name="second").report(store_id(data), {})
        assert keepers(broker) == {"archive": FORGETFUL.segment_bytes, "second": 0}


def test_a_broker_of_another_store_is_not_told(data: Path, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "other", *FOREVER) as broker:
        with pytest.raises(SourceError, match="store_id"):
            Keeping(place=Place(broker_url=broker.url)).report(store_id(data), {})
        assert keepers(broker) == {}


def test_B12_a_broker_whose_log_is_another_one_than_the_archived_is_refused(
    data: Path, tmp_path: Path
) -> None:
    """Restored from a backup it goes on differently: what it has there is not in the archive."""
    restored = tmp_path / "restored"
    shutil.copytree(data, restored)
    for path, number in ((data, 2), (restored, 3)):
        directory = DataDirectory(path, FORGETFUL)
        more = messages(MessageIds(number), 500, subjects=("orders",))
        directory.append(more, frame_records=20, at_ms=START_MS + number * 60_000)
        directory.close()
    archived = Place(path=str(data))
    log = open_log(archived, COMMIT_LOG)
    bounds = log.bounds()
    log.close()
    reached = position(bounds.store_id, bounds.next_offset, bounds.last_frame)
    check_same(archived, COMMIT_LOG, reached)
    with pytest.raises(SourceError, match="was it restored from a backup"):
        check_same(Place(path=str(restored)), COMMIT_LOG, reached)


class Earlier(BaseHTTPRequestHandler):
    """A broker of a version that does not know keepers."""

    def do_POST(self) -> None:
        content = json.dumps({"code": "unknown_path", "message": "nothing is here"}).encode()
        self.send_response(404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def earlier_broker() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Earlier) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_broker_that_does_not_know_keepers_is_said_not_to_wait(earlier_broker: str) -> None:
    keeping = Keeping(place=Place(broker_url=earlier_broker))
    assert not keeping.report("ab" * 16, {})
    assert keeping.not_waited_for == UNKNOWN


def test_a_broker_that_does_not_answer_is_an_error_and_one_that_is_not_wanted_is_not_asked() -> (
    None
):
    nobody = Place(broker_url="http://127.0.0.1:1", wait_s=0)
    with pytest.raises(UnreachableError):
        Keeping(place=nobody).report("ab" * 16, {})
    keeping = keeping_of(nobody, name=None, is_wanted=False)
    assert not keeping.report("ab" * 16, {})
    assert keeping.not_waited_for == NOT_WANTED


def test_a_keeper_that_is_named_and_not_wanted_is_a_wrong_call(tmp_path: Path) -> None:
    line = ["archive", "--tables", str(tmp_path / "a"), "--broker", "http://127.0.0.1:1"]
    done = CliRunner().invoke(pipeline, [*line, "--no-keeper", "--keeper", "mine"])
    assert (done.exit_code, "give one" in done.output) == (WRONG_CALL, True), done.output
