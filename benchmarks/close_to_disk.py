"""R4: durable frames over HTTP against a bare loop of `pwrite` and `fdatasync` over the same frames.

The frames are built beforehand. Over HTTP they go through raw sockets on two connections, so that the
client takes next to nothing and the broker can write one frame while it receives another; a second
row shows the same through HttpTransport, one request at a time. Within a round the ways take turns every
few dozen frames, so that a slow moment of the machine meets all of them. All of them write over blocks
that were written before: the brokers have a recycled segment, the bare loop a file that is full.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from io import FileIO
from itertools import islice
from typing import Final

from benchmarks.blocks import make_recycled, segment_bytes_for, write_blocks
from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.processes import Processes, Worker
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import read_header
from qmq_client.wire.requests import FRAME_CONTENT_TYPE, SendAnswer, decode_control

WAYS: Final = ("bare", "raw", "transport")
#: How often each way has its turn within a round.
TURNS: Final = 12
CONNECTIONS: Final = 2
ANSWER_TIMEOUT_S: Final = 30.0
HEAD_BYTES_MAX: Final = 16 * 1024


class AnswerError(Exception):
    """The broker did not accept a frame."""


def run(bench: Bench) -> list[Row]:
    """Messages per second of each way, and the ratios to the bare loop."""
    frame_count = bench.effort.pick(tiny=4, quick=240, full=480)
    frames = make_frames(frame_count)
    rounds = [run_round(bench, frames) for _ in range(bench.rounds)]
    rates = {way: [rates[way] for rates in rounds] for way in WAYS}
    raw_client = f"raw sockets, {CONNECTIONS} connections of one process"
    our_client = "HttpTransport, one connection"
    ratios = {way: paired_ratios(rates[way], rates["bare"]) for way in WAYS}
    goal = Goal(bound=0.6, is_floor=True)
    figures: list[tuple[str, str, list[float], str, Goal | None]] = [
        ("bare loop", "messages/s", rates["bare"], "pwrite + fdatasync, one thread", None),
        ("over HTTP", "messages/s", rates["raw"], raw_client, None),
        ("over HTTP, HttpTransport", "messages/s", rates["transport"], our_client, None),
        ("over HTTP / bare loop", "ratio", ratios["raw"], raw_client, goal),
        ("over HTTP, HttpTransport / bare loop", "ratio", ratios["transport"], our_client, None),
    ]
    written_bytes = sum(len(frame) for frame in frames)
    return [
        Row(
            figure=figure,
            unit=unit,
            samples=tuple(samples),
            goal=bound,
            conditions=Conditions(
                durability="fdatasync before the answer",
                client=client,
                batch_messages=BATCH_MESSAGES,
                message_bytes=BODY_BYTES,
                written_bytes=written_bytes,
                note="frames built beforehand; all on recycled blocks",
            ),
        )
        for figure, unit, samples, client, bound in figures
    ]


def run_round(bench: Bench, frames: list[bytes]) -> dict[str, float]:
    """Messages per second of each way; a broker for each client, so that neither finds repeats."""
    turns = min(TURNS, len(frames))
    step = len(frames) // turns
    segment_bytes = segment_bytes_for(sum(map(len, frames)))
    with bench.processes() as processes:
        raw = start_client(processes, f"{__name__}:send_raw", len(frames), segment_bytes)
        transport = start_client(
            processes, f"{__name__}:send_by_transport", len(frames), segment_bytes
        )
        shares = iter([frames[i * step : (i + 1) * step] for i in range(turns)])
        path = processes.directory / "bare"
        write_blocks(path, segment_bytes)
        with path.open("r+b", buffering=0) as file:
            seconds = interleave(
                {
                    "bare": lambda: write_bare(file, next(shares)),
                    "raw": lambda: order(raw, step),
                    "transport": lambda: order(transport, step),
                },
                rounds=turns,
            )
    return {way: turns * step * BATCH_MESSAGES / sum(seconds[way]) for way in WAYS}


def start_client(
    processes: Processes, function: str, frame_count: int, segment_bytes: int
) -> Worker:
    """A client process with its frames and a broker of its own, which has a recycled segment."""
    data = processes.directory / f"data-{function.rpartition(':')[2]}"
    make_recycled(data, segment_bytes=segment_bytes)
    broker = processes.start_broker("--segment-bytes", str(segment_bytes), data=data)
    host, port = broker.address
    worker = processes.start_worker(function, host=host, port=port, frame_count=frame_count)
    worker.hear()
    return worker


def order(worker: Worker, frame_count: int) -> float:
    """Let a client send its next frames; the seconds that it took."""
    worker.tell(frame_count)
    seconds: float = worker.hear()
    return seconds


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


def send_raw(control: Control, *, host: str, port: int, frame_count: int) -> None:
    """The client process: as many threads as connections, each with its share of an order."""
    frames = iter(make_frames(frame_count))
    control.tell("ready")
    while True:
        ordered = list(islice(frames, control.hear()))
        # New ones for each order: the broker closes what says nothing for some seconds.
        sockets = [
            socket.create_connection((host, port), ANSWER_TIMEOUT_S) for _ in range(CONNECTIONS)
        ]
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=send_share, args=(sockets[i], ordered[i::CONNECTIONS], errors))
            for i in range(CONNECTIONS)
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
    )
    connection.sendmsg([head.encode()])
    connection.sendall(frame)
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
