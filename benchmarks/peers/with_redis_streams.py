"""Redis Streams by redis-py with hiredis: sends in pipelines, reads with XREADGROUP, acks in the next pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import redis

from benchmarks.peers.traffic import IN_FLIGHT, READ, Begins, PlainSystem, Seen, Send, serve
from benchmarks.worker import Control

GROUP = "board"


class Streams(PlainSystem):
    """See `traffic.System`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.client = redis.Redis(host=host, port=int(port))

    def create(self, subject: str) -> None:
        self.client.xgroup_create(subject, GROUP, id="0", mkstream=True)

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        while batch := list(islice(bodies, IN_FLIGHT)):
            with self.client.pipeline(transaction=False) as pipeline:
                for body in batch:
                    pipeline.xadd(subject, {"body": body})
                pipeline.execute()

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        begins()
        got = 0
        acks: list[bytes] = []
        while got < count or acks:
            with self.client.pipeline(transaction=False) as pipeline:
                if acks:
                    pipeline.xack(subject, GROUP, *acks)
                block_ms = 1_000 if got < count else None
                streams = {subject: ">"}
                pipeline.xreadgroup(GROUP, "consumer-1", streams, count=READ, block=block_ms)
                found = pipeline.execute()[-1]
            messages = found[0][1] if found else []
            for _, fields in messages:
                seen(fields[b"body"])
            acks = [message_id for message_id, _ in messages]
            got += len(messages)

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        begins()
        got = 0
        while got < count:
            found = self.client.xreadgroup(GROUP, "one", {subject: ">"}, count=READ, block=1_000)
            messages = found[0][1] if found else []
            for _, fields in messages:
                seen(fields[b"body"])
            if messages:
                self.client.xack(subject, GROUP, *(message_id for message_id, _ in messages))
            got += len(messages)

    def sender(self, subject: str) -> Send:
        return lambda body: self.client.xadd(subject, {"body": body})

    def pacer(self, subject: str) -> tuple[Send, Callable[[], object]]:
        return self.sender(subject), lambda: None


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client; the server alone decides about the mode."""
    serve(control, Streams(address))
