"""One contender's turn: the same work for each of them, with the processor time of its server and its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.measure import percentile
from benchmarks.peers.contenders import Rig
from benchmarks.processes import Worker

SIZES: Final = (1024, 100)
#: Of messages that are sent one by one, where it hardly matters.
LONE_SIZE: Final = 1024
PER_S: Final = 1_000

RATE, BROKER, CLIENT = "messages/s", "server µs", "client µs"
PRODUCE, DRAIN, BOTH = "produce", "drain", "both at once"
LONE, PACED = "lone send", "1,000/s end to end"
P50, P99, SHARE = "p50 ms", "p99 ms", "server's processors"
UNITS: Final = {
    RATE: "messages/s",
    BROKER: "µs per message",
    CLIENT: "µs per message",
    P50: "ms",
    P99: "ms",
    SHARE: "processors",
}
BATCH_WORK: Final = (PRODUCE, DRAIN, BOTH)

#: Of one figure: size of the messages, work, what was measured.
Key = tuple[int, str, str]
Figures = dict[Key, float]
#: Seconds of the server, and of the clients.
Seconds = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much a turn is."""

    stored: int
    both: int
    #: Sent one by one, and at a rate.
    lone: int
    paced: int


def take_turn(rig: Rig, load: Load) -> Figures:
    """All work once, with messages of each size."""
    figures: Figures = {}
    for size in SIZES:
        figures |= produce_and_drain(rig, size, load.stored)
        figures |= both(rig, size, load.both)
    figures |= lone(rig, load.lone)
    figures |= paced(rig, load.paced)
    return figures


def warm_up(rig: Rig, load: Load) -> None:
    """The batches once, for nothing."""
    for size in SIZES:
        produce_and_drain(rig, size, load.stored)
        both(rig, size, load.both)


def produce_and_drain(rig: Rig, size: int, count: int) -> Figures:
    """Store so many, then read and ack them."""
    subject = rig.subject()
    before = used(rig, rig.producer)
    rig.producer.tell(("produce", subject, size, count))
    started_s, ended_s = rig.producer.hear()
    figures = batch_figures((size, PRODUCE), count, ended_s - started_s, since(rig, before))
    before = used(rig, rig.consumer)
    rig.consumer.tell(("consume", subject, size, count))
    rig.consumer.hear()  # it begins
    started_s, ended_s = rig.consumer.hear()
    spent = since(rig, before, rig.consumer)
    return figures | batch_figures((size, DRAIN), count, ended_s - started_s, spent)


def both(rig: Rig, size: int, count: int) -> Figures:
    """Send and read so many at the same time, from the first send to the last ack."""
    subject = rig.subject()
    rig.consumer.tell(("consume", subject, size, count))
    rig.consumer.hear()  # it begins
    before = used(rig, rig.producer, rig.consumer)
    rig.producer.tell(("produce", subject, size, count))
    started_s, sent_s = rig.producer.hear()
    _, read_s = rig.consumer.hear()
    spent = since(rig, before, rig.producer, rig.consumer)
    return batch_figures((size, BOTH), count, max(sent_s, read_s) - started_s, spent)


def lone(rig: Rig, count: int) -> Figures:
    """Sends that wait for their answer, one after the other."""
    from benchmarks.peers.traffic import FIRST_SENDS

    subject = rig.subject()
    before = used(rig, rig.producer)
    rig.producer.tell(("lone", subject, LONE_SIZE, count))
    times_ms = rig.producer.hear()
    server_s, client_s = since(rig, before)
    sent = count + FIRST_SENDS
    return {
        (LONE_SIZE, LONE, P50): percentile(times_ms, 0.5),
        (LONE_SIZE, LONE, P99): percentile(times_ms, 0.99),
        (LONE_SIZE, LONE, BROKER): 1e6 * server_s / sent,
        (LONE_SIZE, LONE, CLIENT): 1e6 * client_s / sent,
    }


def paced(rig: Rig, count: int) -> Figures:
    """From the making of each message to the reader's hands, at an even rate."""
    subject = rig.subject()
    rig.consumer.tell(("receive", subject, count))
    rig.consumer.hear()  # it begins
    server_s = rig.server.cpu_s()
    rig.producer.tell(("pace", subject, LONE_SIZE, count, PER_S))
    duration_s = rig.producer.hear()
    server_s = rig.server.cpu_s() - server_s
    ages_ms = rig.consumer.hear()
    return {
        (LONE_SIZE, PACED, P50): percentile(ages_ms, 0.5),
        (LONE_SIZE, PACED, P99): percentile(ages_ms, 0.99),
        (LONE_SIZE, PACED, SHARE): server_s / duration_s,
    }


def used(rig: Rig, *clients: Worker) -> Seconds:
    """Processor seconds so far."""
    return rig.server.cpu_s(), sum(client.cpu_s() for client in clients)


def since(rig: Rig, before: Seconds, *clients: Worker) -> Seconds:
    """Processor seconds since then, of the producer when no clients are named."""
    server_s, client_s = used(rig, *(clients or (rig.producer,)))
    return server_s - before[0], client_s - before[1]


def batch_figures(work: tuple[int, str], count: int, duration_s: float, spent: Seconds) -> Figures:
    """Messages per second, and microseconds of each side for one of them."""
    size, name = work
    return {
        (size, name, RATE): count / duration_s,
        (size, name, BROKER): 1e6 * spent[0] / count,
        (size, name, CLIENT): 1e6 * spent[1] / count,
    }
