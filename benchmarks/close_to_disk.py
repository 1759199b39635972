"""R4: durable frames over HTTP against a bare loop of `pwrite` and `fdatasync` over the same frames.

The frames are built beforehand. Over HTTP they go through raw sockets on two connections, so that the
client takes next to nothing and the broker can write one frame while it receives another; a second
row shows the same through stock httpx, one request at a time. Every round has new files on new blocks
for both sides: segments are not recycled, so the goal, stated for recycled blocks, is judged on new
ones.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Final

from benchmarks.load import BATCH_MESSAGES, BODY_BYTES, make_frame, make_messages
from benchmarks.measure import interleave, paired_ratios
from benchmarks.result import Conditions, Goal, Row
from benchmarks.suite import Bench
from benchmarks.worker import Control
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import read_header
from qmq_client.wire.requests import FRAME_CONTENT_TYPE, SendAnswer, decode_control

CONNECTIONS: Final = 2
ANSWER_TIMEOUT_S: Final = 30.0
HEAD_BYTES_MAX: Final = 16 * 1024


class AnswerError(Exception):
    """The broker did not accept a frame."""


def run(bench: Bench) -> list[Row]:
    """Messages per second of each way, and the ratios to the bare loop."""
    frame_count = bench.effort.pick(tiny=4, quick=400, full=600)
    frames = make_frames(frame_count)
    rates = interleave(
        {
            "bare": lambda: bare_rate(bench, frames),
            "raw": lambda: http_rate(bench, f"{__name__}:send_raw", frame_count),
            "httpx": lambda: http_rate(bench, f"{__name__}:send_httpx", frame_count),
        },
        rounds=bench.rounds,
    )
    raw_client = f"raw sockets, {CONNECTIONS} connections of one process"
    httpx_client = "stock httpx through HttpTransport, one connection"
    goal = Goal(bound=0.6, is_floor=True)
    figures: list[tuple[str, str, list[float], str, Goal | None]] = [
        ("bare loop", "messages/s", rates["bare"], "pwrite + fdatasync, one thread", None),
        ("over HTTP", "messages/s", rates["raw"], raw_client, None),
        ("over HTTP, httpx", "messages/s", rates["httpx"], httpx_client, None),
        (
            "over HTTP / bare loop",
            "ratio",
            paired_ratios(rates["raw"], rates["bare"]),
            raw_client,
            goal,
        ),
        (
            "over HTTP, httpx / bare loop",
            "ratio",
            paired_ratios(rates["httpx"], rates["bare"]),
            httpx_client,
            None,
        ),
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
                note="frames built beforehand; both sides on new blocks: segments are not recycled",
            ),
        )
        for figure, unit, samples, client, bound in figures
    ]


def make_frames(count: int) -> list[bytes]:
    """Frames whose message ids all differ, so that no broker takes one for a repetition."""
    messages = make_messages()
    return [make_frame(messages, BATCH_MESSAGES) for _ in range(count)]


def bare_rate(bench: Bench, frames: list[bytes]) -> float:
    """Messages per second into a file, one flush for each frame."""
    path = bench.directory / "bare"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        offset = 0
        started_s = time.monotonic()
        for frame in frames:
            offset += os.pwrite(descriptor, frame, offset)
            os.fdatasync(descriptor)
        duration_s = time.monotonic() - started_s
    finally:
        os.close(descriptor)
        Path.unlink(path)
    return len(frames) * BATCH_MESSAGES / duration_s


def http_rate(bench: Bench, function: str, frame_count: int) -> float:
    """Messages per second into a new broker."""
    with bench.processes() as processes:
        broker = processes.start_broker()
        worker = processes.start_worker(
            function, host=broker.address[0], port=broker.address[1], frame_count=frame_count
        )
        worker.hear()
        worker.tell("go")
        duration_s: float = worker.hear()
    return frame_count * BATCH_MESSAGES / duration_s


def send_raw(control: Control, *, host: str, port: int, frame_count: int) -> None:
    """The client process: as many threads as connections, each with its share of the frames."""
    frames = make_frames(frame_count)
    sockets = [socket.create_connection((host, port), ANSWER_TIMEOUT_S) for _ in range(CONNECTIONS)]
    errors: list[Exception] = []
    threads = [
        threading.Thread(target=send_share, args=(sockets[i], frames[i::CONNECTIONS], errors))
        for i in range(CONNECTIONS)
    ]
    control.tell("ready")
    control.hear()
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


def send_httpx(control: Control, *, host: str, port: int, frame_count: int) -> None:
    """The client process through `HttpTransport`."""
    frames = make_frames(frame_count)
    transport = HttpTransport(f"http://{host}:{port}")
    transport.send(make_frame(make_messages(), 1))
    control.tell("ready")
    control.hear()
    started_s = time.monotonic()
    for frame in frames:
        transport.send(frame)
    control.tell(time.monotonic() - started_s)
    transport.close()
