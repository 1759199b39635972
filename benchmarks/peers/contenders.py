"""The message systems that are measured side by side: how each is started, and by which client it is used.

A server and its two clients stay up from their first turn to their last one, because a Java machine takes a
turn or two to be as quick as it gets. What cannot be had is left out with the reason.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.machine import ROOT
from benchmarks.peers.environment import CLIENTS, CLIENTS_DIRECTORY, peers_python
from benchmarks.processes import Processes, Worker, processor_s
from benchmarks.suite import Bench

Mode = Literal["durable", "default"]
MODES: Final[tuple[Mode, ...]] = ("durable", "default")

US: Final = "qmq"
#: Of each kind of client: its package among `CLIENTS`, its module, and how it is used.
_PYTHON: Final = {
    "kafka": ("confluent-kafka", "with_kafka", "linger 5 ms, polls of 1,000"),
    "redis": ("redis", "with_redis_streams", "hiredis, pipelines of 1,000"),
    "nats": ("nats-py", "with_nats", "uvloop, 1,000 publishes awaited together, pulls of 1,000"),
    "rabbitmq": ("aio-pika", "with_rabbitmq", "uvloop, 1,000 publishes awaited together"),
}
_JAVA_CLIENT: Final = Path(__file__).with_name("RocketmqClient.java")
_JAVA_CLIENT_MACHINE: Final = ("-Xmx1g", "-Xms512m", "-XX:+UseG1GC")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One system in one mode."""

    #: For people: "Kafka".
    name: str
    #: For `tests/services/engines`; empty for this project.
    engine: str
    mode: Mode
    #: Messages of a full round that are stored and then read, and that are sent and read at the same time.
    stored: int
    both: int

    @property
    def key(self) -> str:
        """Different for each."""
        return self.name if self.name == US else f"{self.name}, {self.mode}"


#: Name, engine, and how many messages each stores in a full round, durable and by default.
_PEERS: Final = (
    ("Kafka", "kafka", 300_000, 300_000),
    ("RocketMQ", "rocketmq", 300_000, 300_000),
    ("Redis Streams", "redis", 150_000, 150_000),
    ("NATS JetStream", "nats", 20_000, 60_000),
    ("RabbitMQ", "rabbitmq", 30_000, 30_000),
)
CONTENDERS: Final = (
    Contender(name=US, engine="", mode="durable", stored=300_000, both=200_000),
    *(
        Contender(name=name, engine=engine, mode=mode, stored=stored[i], both=stored[i] * 2 // 3)
        for i, mode in enumerate(MODES)
        for name, engine, *stored in _PEERS
    ),
)


class Rig:
    """A contender's server with two clients; `close` ends all three."""

    def __init__(self, bench: Bench, contender: Contender) -> None:
        self.contender = contender
        #: Version and what makes a message durable; and the client.
        self.durability = self.client = ""
        self._subjects = 0
        with ExitStack() as stack:
            self.processes: Processes = stack.enter_context(bench.processes())
            self._broker_s = self._start_server(stack)
            self.producer, self.consumer = self._start_client(), self._start_client()
            for worker in (self.producer, self.consumer):
                worker.hear()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def broker_s(self) -> float:
        """Processor seconds of the server's processes so far; 0 for a server that is not ours to see."""
        return self._broker_s()

    def subject(self) -> str:
        """A new one."""
        self._subjects += 1
        name = f"{self.contender.mode}{self._subjects}at{time.monotonic_ns()}"
        self.producer.tell(("create", name))
        self.producer.hear()
        return name

    def _start_server(self, stack: ExitStack) -> Callable[[], float]:
        if not self.contender.engine:
            broker = self.processes.start_broker()
            self._address = broker.url
            self.durability = "fdatasync before the answer"
            return broker.cpu_s
        from tests.services.engines.ladder import start_engine  # late: only peers need the tests

        folder = self.processes.directory / self.contender.engine
        engine = start_engine(self.contender.engine, folder, mode=self.contender.mode)
        stack.callback(engine.close)
        self._engine = engine
        self._address = engine.address
        version, setting = engine.recipe.version(), engine.recipe.setting(self.contender.mode)
        where = "" if engine.processes else ", a server that was running"
        self.durability = f"{version}{where}: {setting}"
        return lambda: sum(map(processor_s, engine.processes))

    def _start_client(self) -> Worker:
        engine = self.contender.engine
        if engine == "rocketmq":
            self.client = (
                f"its Java client {self._engine.recipe.version().split()[-1]}, batches of 500"
            )
            return self._start_java()
        arguments: dict[str, Any] = {"address": self._address, "mode": self.contender.mode}
        if not engine:
            self.client = (
                "HttpTransport, frames of the publisher's size, 2 in flight, pulls of 1,000"
            )
            return self.processes.start_worker("benchmarks.peers.with_qmq:work", **arguments)
        package, module, how = _PYTHON[engine]
        (version,) = (one for one in CLIENTS if one.startswith(f"{package}=="))
        self.client = f"{version.replace('==', ' ')}, {how}"
        return self.processes.start_worker(
            f"benchmarks.peers.{module}:work",
            python=peers_python(CLIENTS, CLIENTS_DIRECTORY),
            **arguments,
        )

    def _start_java(self) -> Worker:
        from tests.services.engines import programs

        libraries = f"{self._engine.recipe.jars}/*"  # type: ignore[attr-defined]  # of its own recipe
        classes = compile_java(_JAVA_CLIENT, libraries)
        home = f"-Duser.home={self.processes.directory}"  # where it writes a log
        line = [str(programs.java()), home, *_JAVA_CLIENT_MACHINE]
        line += ["-cp", os.pathsep.join([str(classes), libraries]), _JAVA_CLIENT.stem]
        return self.processes.start_program("client", [*line, self._address])


def compile_java(source: Path, libraries: str) -> Path:
    """A folder with the classes of this source; compiled again only when it is younger than they are."""
    from tests.services.engines import programs

    classes = ROOT / ".cache" / "engines" / f"classes-{source.stem}"
    with programs.alone("javac"):
        made = classes / f"{source.stem}.class"
        if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
            compiler = programs.on_path_or_debian("javac", "default-jdk-headless")
            line = [str(compiler), "-encoding", "UTF-8", "-nowarn", "-cp", libraries]
            programs.run([*line, "-d", str(classes), str(source)])
    return classes
