"""The message systems that are measured side by side: how each is started, and by which client it is used.

A server and its clients stay up from their first turn to their last one, because a Java machine takes a turn or
two to be as quick as it gets. RocketMQ is used by its Java client as well, because its Python client has no
batches: it sends and acks one message per request.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.machine import ROOT
from benchmarks.peers.environment import CLIENTS, CLIENTS_DIRECTORY, peers_python
from benchmarks.processes import Worker, processor_s
from benchmarks.suite import Bench

Mode = Literal["durable", "default"]
MODES: Final[tuple[Mode, ...]] = ("durable", "default")

US: Final = "qmq"
_JAVA: Final = "RocketmqClient"
#: Of each kind of client: its package among `CLIENTS`, its module, and how it is used.
_PYTHON: Final = {
    "kafka": ("confluent-kafka", "with_kafka", "linger 5 ms, polls of 1,000"),
    "redis": ("redis", "with_redis_streams", "hiredis, pipelines of 1,000"),
    "nats": ("nats-py", "with_nats", "uvloop, 1,000 publishes awaited together, pulls of 1,000"),
    "rabbitmq": ("aio-pika", "with_rabbitmq", "uvloop, 1,000 publishes awaited together"),
    "rocketmq": (
        "rocketmq-python-client",
        "with_rocketmq",
        "by the proxy, 1,000 sends awaited together, a push consumer",
    ),
}
_JAVA_CLIENT: Final = Path(__file__).with_name(f"{_JAVA}.java")
_JAVA_CLIENT_MACHINE: Final = ("-Xmx1g", "-Xms512m", "-XX:+UseG1GC")
#: Of one that only makes topics.
_SMALL_MACHINE: Final = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One system in one mode, by one client."""

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

    @property
    def is_java(self) -> bool:
        """Whether its client is."""
        return self.name.endswith("(Java)")


#: Name, engine, and how many messages each stores in a full round, durable and by default.
_PEERS: Final = (
    ("Kafka", "kafka", 300_000, 300_000),
    ("RocketMQ (Java)", "rocketmq", 300_000, 300_000),
    ("RocketMQ (Python)", "rocketmq", 3_000, 3_000),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One that runs."""

    #: As its clients are given it.
    address: str
    #: Version and what makes a message durable.
    durability: str
    #: Processor seconds of its processes so far.
    cpu_s: Callable[[], float]
    #: How it was started; None for this project's.
    recipe: Any
    stack: ExitStack


class Servers:
    """Those that are up. Contenders that use one engine in one mode share it; it ends with the last of them."""

    def __init__(self, bench: Bench, contenders: Iterable[Contender]) -> None:
        self._bench = bench
        self._users = Counter((one.engine, one.mode) for one in contenders)
        self._up: dict[tuple[str, Mode], Server] = {}

    def start(self, contender: Contender) -> Server:
        """The server of this contender. Raises where it cannot be had."""
        key = contender.engine, contender.mode
        if key not in self._up:
            with ExitStack() as stack:
                self._up[key] = self._start(contender, stack)
        return self._up[key]

    def release(self, contender: Contender) -> None:
        """This contender has no turn any more."""
        key = contender.engine, contender.mode
        self._users[key] -= 1
        if not self._users[key] and key in self._up:
            self._up.pop(key).stack.close()

    def close(self) -> None:
        """End all that are up."""
        while self._up:
            self._up.popitem()[1].stack.close()

    def _start(self, contender: Contender, stack: ExitStack) -> Server:
        if not contender.engine:
            broker = stack.enter_context(self._bench.processes()).start_broker()
            return Server(
                address=broker.url,
                durability="fdatasync before the answer",
                cpu_s=broker.cpu_s,
                recipe=None,
                stack=stack.pop_all(),
            )
        from tests.services.engines.ladder import start_engine  # late: only peers need the tests
        from tests.services.rungs import CHOSEN

        # Of its own: a server that runs already has other settings, and others use it.
        chosen = {CHOSEN: os.environ.get(CHOSEN, "")}
        folder = self._bench.directory / f"{contender.engine}-{contender.mode}"
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        engine = start_engine(contender.engine, folder, mode=contender.mode, environment=chosen)
        stack.callback(engine.close)
        return Server(
            address=engine.address,
            durability=f"{engine.recipe.version()}: {engine.recipe.setting(contender.mode)}",
            cpu_s=lambda: sum(map(processor_s, engine.processes)),
            recipe=engine.recipe,
            stack=stack.pop_all(),
        )


class Rig:
    """A contender's two clients on its server; `close` ends the clients, and the server when it is the last."""

    def __init__(self, bench: Bench, contender: Contender, servers: Servers) -> None:
        self.contender = contender
        self.server = servers.start(contender)
        #: Its version and how it is used.
        self.client = ""
        self._subjects = 0
        with ExitStack() as stack:
            self._processes = stack.enter_context(bench.processes())
            self.producer, self.consumer = self._start_client(), self._start_client()
            #: Makes what messages are kept in.
            self._creator = self.producer
            if contender.engine == "rocketmq" and not contender.is_java:
                self._creator = self._start_java(_SMALL_MACHINE)
            for worker in {id(one): one for one in self._workers()}.values():
                worker.hear()
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the clients; the server is the caller's to release."""
        self._stack.close()

    def subject(self) -> str:
        """A new one."""
        self._subjects += 1
        name = f"{self.contender.mode}{self._subjects}at{time.monotonic_ns()}"
        self._creator.tell(("create", name))
        self._creator.hear()
        return name

    def _workers(self) -> list[Worker]:
        return [self.producer, self.consumer, self._creator]

    def _start_client(self) -> Worker:
        engine, address = self.contender.engine, self.server.address
        if self.contender.is_java:
            version = self.server.recipe.version().split()[-1]
            self.client = f"its Java client {version}, batches of 500, a push consumer"
            return self._start_java()
        if not engine:
            self.client = (
                "HttpTransport, frames of the publisher's size, 2 in flight, pulls of 1,000"
            )
            return self._processes.start_worker(
                "benchmarks.peers.with_qmq:work", address=address, mode=self.contender.mode
            )
        if engine == "rocketmq":
            address = f"127.0.0.1:{self.server.recipe.proxy}"
        package, module, how = _PYTHON[engine]
        (version,) = (one for one in CLIENTS if one.startswith(f"{package}=="))
        self.client = f"{version.replace('==', ' ')}, {how}"
        return self._processes.start_worker(
            f"benchmarks.peers.{module}:work",
            python=peers_python(CLIENTS, CLIENTS_DIRECTORY),
            environment={"HOME": str(self._processes.directory)},  # where RocketMQ's writes a log
            address=address,
            mode=self.contender.mode,
        )

    def _start_java(self, machine: Sequence[str] = _JAVA_CLIENT_MACHINE) -> Worker:
        from tests.services.engines import programs

        libraries = f"{self.server.recipe.jars}/*"
        classes = compile_java(_JAVA_CLIENT, libraries)
        home = f"-Duser.home={self._processes.directory}"  # where it writes a log
        line = [str(programs.java()), home, *machine]
        line += ["-cp", os.pathsep.join([str(classes), libraries]), _JAVA]
        return self._processes.start_program("client", [*line, self.server.address])


def reason(error: Exception) -> str:
    """What happened and the last that was said about it, without the address of a package index."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"https?://\S+", "…", f"{first}: {rest[-1]}" if rest else first)


def compile_java(source: Path, libraries: str) -> Path:
    """A folder with the classes of this source; compiled again only when it is younger than they are."""
    from tests.services.engines import programs
    from tests.services.packages import locked, run

    classes = ROOT / ".cache" / "engines" / f"classes-{source.stem}"
    with locked(programs.FOLDER / "javac.lock"):
        made = classes / f"{source.stem}.class"
        if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
            compiler = programs.on_path_or_debian("javac", "default-jdk-headless")
            line = [str(compiler), "-encoding", "UTF-8", "-nowarn", "-cp", libraries]
            run([*line, "-d", str(classes), str(source)])
    return classes
