"""Redis Streams as redis-py's pages show them: a group that reads with XREADGROUP and acks with XACK,
both in one pipeline. Replies are parsed by redis-py itself, as it is when installed alone, or by hiredis.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import redis
from redis._parsers import _HiredisParser, _RESP2Parser

from benchmarks.worker import Control

STREAM = "flight.departed"
GROUP = "board"
READ = 1000
FILL = 500
BODY = bytes(range(256)) * 4


@dataclass(frozen=True, slots=True)
class Message:
    """What a handler would be given."""

    message_id: str
    body: bytes
    key: str
    tags: tuple[str, ...]
    trace: str


def work(control: Control, *, port: int, parser: str) -> None:
    """Do what the parent says until it is gone: [count] fills a stream and reads all of it."""
    parsers = {"hiredis": _HiredisParser, "own": _RESP2Parser}
    pool = redis.ConnectionPool(port=port, protocol=2, parser_class=parsers[parser])
    client = redis.Redis(connection_pool=pool)
    control.tell("ready")
    while True:
        count = control.hear()
        client.delete(STREAM)
        fill(client, count)
        client.xgroup_create(STREAM, GROUP, id="0")
        cpu_s, started_s = time.process_time(), time.perf_counter()
        consume(client, count)
        control.tell((time.perf_counter() - started_s, time.process_time() - cpu_s))


def fill(client: redis.Redis, count: int) -> None:
    fields = {"key": "N14228", "tags": "severe", "trace": "00-4bf92f3577b34da6a3ce929d0e0e4736"}
    for first in range(0, count, FILL):
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(min(FILL, count - first)):
                pipeline.xadd(STREAM, {**fields, "body": BODY})
            pipeline.execute()


def consume(client: redis.Redis, count: int) -> None:
    """Read everything once, and ack it."""
    left = count
    acks: list[bytes] = []
    while left or acks:
        with client.pipeline(transaction=False) as pipeline:
            if acks:
                pipeline.xack(STREAM, GROUP, *acks)
            pipeline.xreadgroup(GROUP, "consumer-1", {STREAM: ">"}, count=READ)
            *acked, found = pipeline.execute()
        assert not acks or acked == [len(acks)]
        messages = found[0][1] if found else []
        acks = [message_id for message_id, fields in messages if decode(message_id, fields).body]
        assert len(acks) == len(messages)
        left -= len(messages)
    assert left == 0


def decode(message_id: bytes, fields: dict[bytes, bytes]) -> Message:
    return Message(
        message_id=message_id.decode(),
        body=fields[b"body"],
        key=fields[b"key"].decode(),
        tags=tuple(fields[b"tags"].decode().split(",")),
        trace=fields[b"trace"].decode(),
    )
