"""R4: durable frames over HTTP against a bare loop of `pwrite` and `fdatasync` over the same frames.

The frames are built beforehand. Over HTTP they go through raw sockets on two connections, so that the
client takes next to nothing and the broker can write one frame while it receives another; the same client
sends them to a server that does nothing but write and sync (`close_to_disk_floor.py`): what of the time is
this machine's, and what is ours. The same once more with four connections, as of several publishers: while
frames wait for the disk others are received. A last row shows HttpTransport, one request at a time. Within a round the
ways take turns every few dozen frames, so that a slow moment of the machine meets all of them. All of them
write over blocks that were written before: the brokers have a recycled segment, the others a file that is
full.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import FileIO
from itertools import islice
from typing import Any, Final

from benchmarks import close_to_disk_floor
from benchmarks.blocks import make_recycled, segment_bytes_for, write_blocks
from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.processes import Child, Processes, Worker
from benchmarks.result import Conditions, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import read_header
from qmq_client.wire.requests import FRAME_CONTENT_TYPE, SendAnswer, decode_control

WAYS: Final = ("bare", "floor", "raw", "floor of four", "four", "transport")
#: How often each way has its turn within a round.
TURNS: Final = 12
CONNECTIONS: Final = 2
CONNECTIONS_OF_MANY: Final = 4
ANSWER_TIMEOUT_S: Final = 30.0
HEAD_BYTES_MAX: Final = 16 * 1024


class AnswerError(Exception):
    """The broker did not accept a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What one round gave, by way."""

    rates: dict[str, float]
    #: Processor microseconds of the server for each frame.
    server_us: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Way:
    """A client in a process of its own, and the server that it sends to."""

    client: Worker
    server: Child
    #: Processor seconds of the server during this way's turns.
    used_s: float = 0.0

    def send(self, frame_count: int) -> float:
        """Let the client send its next frames; the seconds that it took."""
        began_s = self.server.cpu_s()
        self.client.tell(frame_count)
        seconds: float = self.client.hear()
        self.used_s += self.server.cpu_s() - began_s
        return seconds


def run(bench: Bench) -> list[Row]:
    """Messages per second of each way, the ratios to the bare loop, and the servers' processor time."""
    frame_count = bench.effort.pick(tiny=4, quick=240, full=480)
    frames = make_frames(frame_count)
    rounds = [run_round(bench, frames) for _ in range(bench.rounds)]
    rates = {way: [one.rates[way] for one in rounds] for way in WAYS}
    ratios = {way: paired_ratios(rates[way], rates["bare"]) for way in WAYS}
    server_us = {way: [one.server_us[way] for one in rounds] for way in rounds[0].server_us}
    raw_client = f"raw sockets, {CONNECTIONS} connections of one process"
    four_client = f"raw sockets, {CONNECTIONS_OF_MANY} connections of one process"
    is_floor = "; a server that only writes and syncs"
    floor_client, floor_of_four_client = raw_client + is_floor, four_client + is_floor
    our_client = "HttpTransport, one connection"
    to_floor = paired_ratios(rates["raw"], rates["floor"])
    figures: list[tuple[str, str, list[float], str]] = [
        ("bare loop", "messages/s", rates["bare"], "pwrite + fdatasync, one thread"),
        ("over HTTP", "messages/s", rates["raw"], raw_client),
        ("over HTTP, four", "messages/s", rates["four"], four_client),
        ("over HTTP, HttpTransport", "messages/s", rates["transport"], our_client),
        ("floor: over HTTP", "messages/s", rates["floor"], floor_client),
        (
            "floor: over HTTP, four",
            "messages/s",
            rates["floor of four"],
            floor_of_four_client,
        ),
        ("over HTTP / bare loop", "ratio", ratios["raw"], raw_client),
        ("over HTTP, four / bare loop", "ratio", ratios["four"], four_client),
        ("over HTTP, HttpTransport / bare loop", "ratio", ratios["transport"], our_client),
        ("floor: over HTTP / bare loop", "ratio", ratios["floor"], floor_client),
        (
            "floor: over HTTP, four / bare loop",
            "ratio",
            ratios["floor of four"],
            floor_of_four_client,
        ),
        ("over HTTP, to the floor's", "ratio", to_floor, raw_client),
        ("over HTTP, broker", "µs of CPU per frame", server_us["raw"], raw_client),
        ("over HTTP, four, broker", "µs of CPU per frame", server_us["four"], four_client),
        ("floor: over HTTP, server", "µs of CPU per frame", server_us["floor"], floor_client),
    ]
    written_bytes = sum(map(len, frames))
    return [_row(*figure, written_bytes) for figure in figures]


def _row(
    figure: str,
    unit: str,
    samples: list[float],
    client: str,
    written_bytes: int,
) -> Row:
    return Row(
        figure=figure,
        unit=unit,
        samples=tuple(samples),
        conditions=Conditions(
            durability="fdatasync before the answer",
            client=client,
            batch_messages=BATCH_MESSAGES,
            message_bytes=BODY_BYTES,
            written_bytes=written_bytes,
            note="frames built beforehand; all on recycled blocks",
        ),
    )


def run_round(bench: Bench, frames: list[bytes]) -> _Round:
    """Each way once; a server for each client, so that no broker finds repeats."""
    turns = min(TURNS, len(frames))
    step = len(frames) // turns
    segment_bytes = segment_bytes_for(sum(map(len, frames)))
    with bench.processes() as processes:
        ways = {
            "floor": start_floor(processes, len(frames), segment_bytes, CONNECTIONS),
            "floor of four": start_floor(
                processes, len(frames), segment_bytes, CONNECTIONS_OF_MANY
            ),
            "raw": start_way(
                processes, "send_raw", len(frames), segment_bytes, connections=CONNECTIONS
            ),
            "four": start_way(
                processes, "send_raw", len(frames), segment_bytes, connections=CONNECTIONS_OF_MANY
            ),
            "transport": start_way(processes, "send_by_transport", len(frames), segment_bytes),
        }
        shares = iter([frames[i * step : (i + 1) * step] for i in range(turns)])
        path = processes.directory / "bare"
        write_blocks(path, segment_bytes)
        with path.open("r+b", buffering=0) as file:
            work: dict[str, Callable[[], float]] = {
                "bare": lambda: write_bare(file, next(shares)),
                **{name: partial(way.send, step) for name, way in ways.items()},
            }
            seconds = interleave(work, rounds=turns)
    return _Round(
        rates={way: turns * step * BATCH_MESSAGES / sum(seconds[way]) for way in WAYS},
        server_us={name: 1e6 * way.used_s / (turns * step) for name, way in ways.items()},
    )


def start_way(
    processes: Processes,
    function: str,
    frame_count: int,
    segment_bytes: int,
    **more: int,
) -> _Way:
    """A client process with its frames and a broker of its own, which has a recycled segment."""
    data = processes.directory / "-".join(("data", function, *map(str, more.values())))
    make_recycled(data, segment_bytes=segment_bytes)
    broker = processes.start_broker("--segment-bytes", str(segment_bytes), data=data)
    return _Way(
        client=start_client(processes, function, broker.address, frame_count, **more),
        server=broker,
    )


def start_floor(processes: Processes, frame_count: int, file_bytes: int, connections: int) -> _Way:
    """The client of raw sockets with a server that only writes, over blocks that were written."""
    path = processes.directory / f"floor-{connections}"
    write_blocks(path, file_bytes)
    server = processes.start_worker(f"{close_to_disk_floor.__name__}:serve", path=str(path))
    address = ("127.0.0.1", server.hear())
    client = start_client(processes, "send_raw", address, frame_count, connections=connections)
    return _Way(client=client, server=server)


def start_client(
    processes: Processes, function: str, address: tuple[str, int], frame_count: int, **more: int
) -> Worker:
    """A client process, once its frames are built."""
    host, port = address
    arguments: dict[str, Any] = {"host": host, "port": port, "frame_count": frame_count, **more}
    worker = processes.start_worker(f"{__name__}:{function}", **arguments)
    worker.hear()
    return worker


def write_bare(file: FileIO, frames: list[bytes]) -> float:
    """Write frames from where the file stands on, one flush for each; the seconds that it took."""
    descriptor, offset = file.fileno(), file.tell()
    started_s = time.monotonic()
    for frame in frames:
        offset += os.pwrite(descriptor, frame, offset)
        os.fdatasync(descriptor)
    duration_s = time.monotonic() - started_s
    file.seek(offset)
    return duration_s


def make_frames(count: int) -> list[bytes]:
    """Frames whose message ids all differ, so that no broker takes one for a repetition."""
    messages = make_messages()
    return [make_frame(messages, BATCH_MESSAGES) for _ in range(count)]


def send_raw(control: Control, *, host: str, port: int, frame_count: int, connections: int) -> None:
    """The client process: as many threads as connections, each with its share of an order."""
    frames = iter(make_frames(frame_count))
    control.tell("ready")
    while True:
        ordered = list(islice(frames, control.hear()))
        # New ones for each order: the broker closes what says nothing for some seconds.
        sockets = [
            socket.create_connection((host, port), ANSWER_TIMEOUT_S) for _ in range(connections)
        ]
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=send_share, args=(sockets[i], ordered[i::connections], errors))
            for i in range(connections)
        ]
        started_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        duration_s = time.monotonic() - started_s
        for connection in sockets:
            connection.close()
        if errors:
            raise errors[0]
        control.tell(duration_s)


def send_share(connection: socket.socket, frames: list[bytes], errors: list[Exception]) -> None:
    """One thread of the client; its failure is raised by the one that joins it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        for frame in frames:
            post(connection, frame)
    except (OSError, AnswerError) as error:
        errors.append(error)


def post(connection: socket.socket, frame: bytes) -> None:
    """One request on a kept connection; raises `AnswerError` unless the very frame is accepted."""
    head = (
        f"POST /v1/send HTTP/1.1\r\nhost: broker\r\ncontent-type: {FRAME_CONTENT_TYPE}\r\n"
        f"content-length: {len(frame)}\r\n\r\n"
    ).encode()
    sent_bytes = connection.sendmsg([head, frame])
    for part in (head[sent_bytes:], memoryview(frame)[max(0, sent_bytes - len(head)) :]):
        if part:
            connection.sendall(part)
    received = b""
    while b"\r\n\r\n" not in received:
        received += receive(connection)
    answer_head, _, body = received.partition(b"\r\n\r\n")
    status, *fields = answer_head.decode("latin-1").lower().split("\r\n")
    lengths = [field.partition(":")[2] for field in fields if field.startswith("content-length:")]
    if " 200 " not in status + " " or not lengths:
        raise AnswerError(f"{status}: {body[:300]!r}")
    while len(body) < int(lengths[0]):
        body += receive(connection)
    answer = decode_control(body, SendAnswer)
    if (answer.frame_crc, answer.duplicates) != (read_header(frame).body_crc, 0):
        raise AnswerError(f"not this frame, or not new: {answer}")


def receive(connection: socket.socket) -> bytes:
    """Some bytes; raises `AnswerError` at the end of the stream."""
    data = connection.recv(HEAD_BYTES_MAX)
    if not data:
        raise AnswerError("the broker closed the connection")
    return data


def send_by_transport(control: Control, *, host: str, port: int, frame_count: int) -> None:
    """The client process through `HttpTransport`."""
    frames = iter(make_frames(frame_count))
    transport = HttpTransport(f"http://{host}:{port}")
    transport.send(make_frame(make_messages(), 1))
    control.tell("ready")
    while True:
        ordered = list(islice(frames, control.hear()))
        started_s = time.monotonic()
        for frame in ordered:
            transport.send(frame)
        control.tell(time.monotonic() - started_s)
