"""The broker as a process: killed, stopped, started twice, started on what is not its own."""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.limits import FaceLimits
from qmq_broker.options import StoreOptions
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files import layout
from qmq_client.wire.deliveries import parse_deliveries
from qmq_client.wire.frame import parse_message_frame
from qmq_client.wire.limits import Limits
from qmq_client.wire.record import record_message_id
from qmq_client.wire.requests import (
    FRAME_CONTENT_TYPE,
    PullRequest,
    Settlement,
    SettleRequest,
    encode_control,
)
from tests.broker.service.rig import GROUP, SUBJECT, make_frame, new_ids
from tests.kit.broker_process import SERVE_WITH_FAULTS, BrokerProcess
from tests.kit.waiting import DEADLINE_S

HEADERS = {"content-type": FRAME_CONTENT_TYPE, "accept": FRAME_CONTENT_TYPE}
JOURNALS = (layout.IDS, layout.ENTRIES)


def send(client: httpx.Client, frame: bytes) -> httpx.Response:
    return client.post("/v1/send", content=frame, headers=HEADERS)


@contextmanager
def serving(data: Path) -> Iterator[tuple[BrokerProcess, httpx.Client]]:
    """A broker on this directory, and somebody who asks it."""
    with (
        BrokerProcess(data) as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        yield broker, client


def pull_all(client: httpx.Client, group: str = GROUP) -> list[bytes]:
    """Message ids of everything that a new group gets, in order."""
    ids: list[bytes] = []
    while True:
        request = PullRequest(
            subject=SUBJECT, group=group, consumer="one", max_messages=10_000, max_bytes=2**22
        )
        reply = client.post("/v1/pull", content=encode_control(request), headers=HEADERS)
        given = parse_deliveries(reply.content, frame_bytes_max=2**24)
        if not given.messages:
            return ids
        first = given.head.first_pull_sequence
        ids += [record_message_id(message.record) for message in given.messages]
        done = Settlement(token=given.head.token, acks=((first, first + len(given.messages)),))
        settle = SettleRequest(subject=SUBJECT, group=group, consumer="one", settlements=(done,))
        client.post("/v1/settle", content=encode_control(settle), headers=HEADERS)


class Senders:
    """Threads that send until the broker is gone, and know what it accepted."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._lock = threading.Lock()
        self.accepted: list[list[bytes]] = []
        self.unanswered: list[list[bytes]] = []
        self.enough = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()

    def _run(self) -> None:
        ids = new_ids()
        with httpx.Client(base_url=self._url, timeout=DEADLINE_S) as client:
            while True:
                frame = make_frame([b"x" * 100] * 20, ids=ids)
                sent = parse_message_frame(frame).message_ids()
                try:
                    reply = send(client, frame)
                except httpx.HTTPError:
                    with self._lock:
                        self.unanswered.append(sent)
                    return
                if reply.status_code == 503:
                    return
                assert reply.status_code == 200
                with self._lock:
                    self.accepted.append(sent)
                    if len(self.accepted) >= 40:
                        self.enough.set()


def test_B3_everything_accepted_before_a_kill_is_there_and_the_rest_wholly_or_not_at_all(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    accepted: list[list[bytes]] = []
    unanswered: list[list[bytes]] = []
    for _ in range(2):
        with BrokerProcess(data) as broker:
            senders = Senders(broker.url, 4)
            assert senders.enough.wait(DEADLINE_S)
            broker.kill()
            senders.join()
        accepted += senders.accepted
        unanswered += senders.unanswered
    with serving(data) as (broker, client):
        found = pull_all(client)
        assert broker.stop() == ExitCode.OK
    assert len(set(found)) == len(found), "nothing is stored twice"
    place = {message_id: number for number, message_id in enumerate(found)}
    for ids in accepted:
        first = place[ids[0]]
        assert [place[message_id] for message_id in ids] == list(range(first, first + len(ids)))
    for ids in unanswered:
        assert len({message_id in place for message_id in ids}) == 1, "wholly or not at all"
    known = {message_id for ids in accepted + unanswered for message_id in ids}
    assert set(found) <= known


def test_F38_a_stop_under_load_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data) as broker:
        senders = Senders(broker.url, 4)
        assert senders.enough.wait(DEADLINE_S)
        assert broker.stop() == ExitCode.OK
        senders.join()
    with serving(data) as (broker, client):
        found = set(pull_all(client))
    accepted = {message_id for ids in senders.accepted for message_id in ids}
    assert accepted <= found
    assert found <= accepted | {message_id for ids in senders.unanswered for message_id in ids}


def test_F30_C1_what_a_killed_broker_had_handed_out_is_settled_at_the_next_one(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    request = PullRequest(subject=SUBJECT, group=GROUP, consumer="one", max_messages=2)
    with serving(data) as (broker, client):
        send(client, make_frame([b"a", b"b", b"c"]))
        reply = client.post("/v1/pull", content=encode_control(request), headers=HEADERS)
        given = parse_deliveries(reply.content, frame_bytes_max=2**24)
        broker.kill()
    with serving(data) as (broker, client):
        done = Settlement(token=given.head.token, acks=((0, 2),))
        settle = SettleRequest(subject=SUBJECT, group=GROUP, consumer="one", settlements=(done,))
        accept = {**HEADERS, "accept": "application/json"}
        reply = client.post("/v1/settle", content=encode_control(settle), headers=accept)
        assert reply.json() == {"settled": 2, "stale": []}
        (group,) = client.get("/v1/groups").json()["groups"]
        assert (group["cursor"], group["in_flight"], group["lag"]) == (2, 0, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_F38_a_stop_is_clean_and_the_next_start_says_so(tmp_path: Path, number: int) -> None:
    data = tmp_path / "data"
    with serving(data) as (broker, client):
        assert send(client, make_frame([b"a"])).status_code == 200
        broker.send_signal(number)
        assert broker.wait() == ExitCode.OK
    assert "stopped clean=True" in broker.log
    with BrokerProcess(data) as broker:
        assert "clean=True" in next(line for line in broker.lines if " opened " in line)


def test_C8_a_stop_answers_the_pull_that_waits(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "data") as broker,
        httpx.Client(base_url=broker.url, timeout=60) as client,
    ):
        replies: list[httpx.Response] = []
        body = {"subject": "a", "group": "b", "consumer": "c", "wait_ms": 50_000}
        waiting = threading.Thread(
            target=lambda: replies.append(client.post("/v1/pull", json=body))
        )
        waiting.start()
        wait_until_group(broker.url)
        assert broker.stop() == ExitCode.OK
        waiting.join(DEADLINE_S)
    assert [(reply.status_code, reply.json()["messages"]) for reply in replies] == [(200, [])]


def wait_until_group(url: str) -> None:
    """Until a group is known, which is when its first pull has begun to wait."""
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        for _ in range(10_000):
            if client.get("/v1/groups").json()["groups"]:
                return
    raise AssertionError("no pull arrived")


def test_a_read_only_broker_delivers_and_takes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as (broker, client):
        send(client, make_frame([b"a"]))
        broker.stop()
    with (
        BrokerProcess(data, "--read-only") as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        assert send(client, make_frame([b"b"])).status_code == 503
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["takes_messages"]) == (200, False)
        assert len(pull_all(client)) == 1


def test_damage_in_the_action_log_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as (broker, client):
        send(client, make_frame([b"a"]))
        assert len(pull_all(client)) == 1
        assert broker.stop() == ExitCode.OK
    (segment,) = (data / "actionlog").iterdir()
    content = bytearray(segment.read_bytes())
    content[content.index(GROUP.encode())] ^= 1
    segment.write_bytes(content)
    before = snapshot(data)
    checkpoints = [path.read_bytes() for path in sorted(data.glob("checkpoint*"))]
    broker = BrokerProcess(data)
    assert broker.run_to_end() == ExitCode.CORRUPTION
    assert "code=corruption" in broker.log
    assert 'remedy="Stop the broker, and run `qmq store verify`' in broker.log
    assert snapshot(data) == before, "nothing was changed"
    assert "CLEAN" in before
    assert [path.read_bytes() for path in sorted(data.glob("checkpoint*"))] == checkpoints
    assert "actionlog/" in broker.log
    assert "Traceback" not in broker.log


def test_F38_a_second_signal_ends_a_stop_that_takes_long(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker, broker.connection() as slow:
        slow.sendall(b"POST /v1/send HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
        assert slow.recv(100).startswith(b"HTTP/1.1 100"), "the request is under way"
        broker.send_signal(signal.SIGTERM)
        broker.wait_for(" stopping ")
        broker.send_signal(signal.SIGTERM)
        assert broker.wait() == ExitCode.UNCLEAN
        assert " forced " in broker.log


def test_F29_B9_a_second_broker_on_a_directory_refuses_and_disturbs_nobody(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as (first, client):
        send(client, make_frame([b"a"]))
        before = without_journals(data)
        second = BrokerProcess(data)
        assert second.run_to_end() == ExitCode.DIRECTORY
        assert str(data) in second.log
        assert "is in use by pid" in second.log
        assert without_journals(data) == before
        assert send(client, make_frame([b"b"])).status_code == 200
        assert first.stop() == ExitCode.OK


def test_B10_a_start_tells_its_limits_and_ends_with_a_short_line_of_where_it_listens(
    tmp_path: Path,
) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        *_, limits, listening = broker.lines
        assert "INFO qmq_broker limits wire.record_bytes=4194304 " in limits
        assert " store.retain_ms=259200000 " in limits
        assert len(limits) < 250, "a line for people; --log-level debug has all of them"
        where = listening.partition(" listening ")[2].strip()
        assert re.fullmatch(rf'url={re.escape(broker.url)} pid=\d+ tokens="none needed"', where)


def test_B10_a_start_at_debug_level_tells_every_limit(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", "--log-level", "debug") as broker:
        (limits,) = (line for line in broker.lines if " qmq_broker limits " in line)
        for options in (Limits(), ServiceLimits(), FaceLimits(), StoreOptions()):
            for field in dataclasses.fields(options):
                assert f".{field.name}=" in limits


def test_an_unknown_format_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data) as broker:
        assert broker.stop() == ExitCode.OK
    format_file = data / "FORMAT"
    content = bytearray(format_file.read_bytes())
    for position in range(min(12, len(content))):
        content[position] ^= 0x55
    format_file.write_bytes(content)
    before = snapshot(data)
    broker = BrokerProcess(data)
    assert broker.run_to_end() in (ExitCode.DIRECTORY, ExitCode.CORRUPTION)
    assert " not_opened " in broker.log
    assert snapshot(data) == before


def test_a_taken_port_is_named_with_its_remedy_and_no_directory_is_made(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "one") as first:
        other = tmp_path / "two"
        second = BrokerProcess(other, listen=f"127.0.0.1:{first.port}")
        assert second.run_to_end() == ExitCode.ADDRESS
        assert f"address=127.0.0.1:{first.port}" in second.log
        assert 'remedy="Stop what listens there, or' in second.log
        assert "--listen HOST:PORT" in second.log
        assert not other.exists()


def test_an_address_that_is_not_of_this_machine_is_called_so(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", "--insecure", listen="192.0.2.1:9470")
    assert broker.run_to_end() == ExitCode.ADDRESS
    assert 'remedy="Give an address of this machine' in broker.log


@pytest.mark.parametrize(
    ("listen", "more", "what"),
    [
        ("0.0.0.0:0", (), "--insecure"),
        ("192.0.2.1:0", (), "--insecure"),
        ("[::]:0", (), "--insecure"),
        ("example.org:80", (), "--insecure"),
        ("127.0.0.1", (), "HOST:PORT"),
        ("127.0.0.1:http", (), "HOST:PORT"),
        ("127.0.0.1:70000", (), "HOST:PORT"),
        (":80", (), "HOST:PORT"),
        ("127.0.0.1:0", ("--segment-bytes", "100"), "--segment-bytes"),
        ("127.0.0.1:0", ("--drain-ms", "-1"), "drain_ms"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, listen: str, more: tuple[str, ...], what: str
) -> None:
    broker = BrokerProcess(tmp_path / "data", *more, listen=listen)
    assert broker.run_to_end() == ExitCode.USAGE
    assert what in broker.log
    assert "Traceback" not in broker.log
    assert not (tmp_path / "data").exists()


def test_a_failed_sync_ends_the_broker_with_its_own_code_and_a_restart_has_what_was_accepted(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    accepted: list[bytes] = []
    with (
        BrokerProcess(data, "--syncs", "12", command=SERVE_WITH_FAULTS) as broker,
        httpx.Client(base_url=broker.url, timeout=DEADLINE_S) as client,
    ):
        while True:
            frame = make_frame([b"a"])
            reply = send(client, frame)
            if reply.status_code != 200:
                break
            accepted += parse_message_frame(frame).message_ids()
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert broker.wait() == ExitCode.POISONED
    assert " poisoned " in broker.log
    assert "planted fault" in broker.log
    assert accepted
    with serving(data) as (broker, client):
        found = pull_all(client)
    assert found[: len(accepted)] == accepted
    assert len(found) <= len(accepted) + 1


def snapshot(data: Path) -> dict[str, bytes]:
    """Every file but the lock, which says who looked last."""
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in sorted(data.rglob("*"))
        if path.is_file() and path.name != "LOCK" and not path.name.startswith("checkpoint")
    }


def without_journals(data: Path) -> dict[str, bytes]:
    """The same without what a running broker writes by itself at a checkpoint."""
    files = snapshot(data).items()
    return {path: content for path, content in files if path.partition("/")[0] not in JOURNALS}
