"""This project by `HttpTransport`, in the client's own way: frames as large as the publisher's, two in flight,
pulls of 1,000, each acked with the next.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

from benchmarks.load import encode_message
from benchmarks.peers.traffic import READ, READ_BYTES, Begins, PlainSystem, Seen, Send, serve
from benchmarks.worker import Control
from qmq_client.message import Message, decode_message
from qmq_client.options import ProducerOptions
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.requests import PullRequest, Settlement, SettleRequest

GROUP = "board"
#: The publisher has up to two requests on their way.
SENDERS = 2
#: Of a pull that drains, whose last one finds nothing, and of one that waits for single messages.
DRAIN_WAIT_MS, RECEIVE_WAIT_MS = 20, 1_000
OPTIONS = ProducerOptions()


class Qmq(PlainSystem):
    """See `traffic.System`."""

    def __init__(self, url: str, *, group: str = GROUP) -> None:
        self.transport = HttpTransport(url)
        self._group = group

    def create(self, subject: str) -> None:
        """The first message makes it."""

    def produce(self, subject: str, bodies: Iterator[bytes]) -> None:
        batches = batches_of(bodies)
        turn = threading.Lock()

        def send_until_the_end() -> None:
            while True:
                with turn:
                    batch = next(batches, None)
                if batch is None:
                    return
                assert self._send(subject, batch) == len(batch)

        with ThreadPoolExecutor(SENDERS) as pool:
            for sent in [pool.submit(send_until_the_end) for _ in range(SENDERS)]:
                sent.result()

    def consume(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        begins()
        self._pull(subject, count, seen, DRAIN_WAIT_MS)

    def receive(self, subject: str, count: int, seen: Seen, begins: Begins) -> None:
        begins()
        self._pull(subject, count, seen, RECEIVE_WAIT_MS)

    def sender(self, subject: str) -> Send:
        return lambda body: self._send(subject, [body])

    def pacer(self, subject: str) -> tuple[Send, Callable[[], object]]:
        """What waits goes as one frame."""
        waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        pool = ThreadPoolExecutor(SENDERS)
        sent = [pool.submit(self._send_waiting, subject, waiting) for _ in range(SENDERS)]

        def wait() -> None:
            for _ in sent:
                waiting.put(None)
            for one in sent:
                one.result()
            pool.shutdown()

        return waiting.put, wait

    def _send_waiting(self, subject: str, waiting: queue.SimpleQueue[bytes | None]) -> None:
        while (body := waiting.get()) is not None:
            batch = [body]
            while len(batch) < OPTIONS.batch_messages:
                try:
                    body = waiting.get_nowait()
                except queue.Empty:
                    break
                if body is None:
                    waiting.put(None)
                    break
                batch.append(body)
            self._send(subject, batch)

    def _send(self, subject: str, bodies: Iterable[bytes]) -> int:
        records = [encode_message(Message(subject, body)) for body in bodies]
        return self.transport.send(build_message_frame({subject: records})).count

    def _pull(self, subject: str, count: int, seen: Seen, wait_ms: int) -> None:
        request = partial(
            PullRequest,
            subject=subject,
            group=self._group,
            consumer="one",
            max_messages=READ,
            max_bytes=READ_BYTES,
            wait_ms=wait_ms,
        )
        got = 0
        settlements: tuple[Settlement, ...] = ()
        while got < count:
            answer = self.transport.pull(request(settlements=settlements))
            assert not answer.head.stale, "an ack came too late"
            for delivered in answer.messages:
                seen(decode_message(subject, delivered.record).body)
            settlements = ()
            if given := len(answer.messages):
                got += given
                first = answer.head.first_pull_sequence
                acks = ((first, first + given),)
                settlements = (Settlement(token=answer.head.token, acks=acks),)
        settle = SettleRequest(
            subject=subject, group=self._group, consumer="one", settlements=settlements
        )
        assert not self.transport.settle(settle).stale


def batches_of(bodies: Iterator[bytes]) -> Iterator[list[bytes]]:
    """As many at a time as the publisher puts into one frame."""
    for body in bodies:
        rest = max(1, min(OPTIONS.batch_messages, OPTIONS.batch_bytes // max(1, len(body)))) - 1
        yield [body, *islice(bodies, rest)]


def work(control: Control, *, address: str, mode: str) -> None:
    """The process of this client; the broker is durable in every mode."""
    serve(control, Qmq(address))
