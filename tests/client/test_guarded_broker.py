"""Everything of the client at a broker with tokens and TLS, by what one configuration file says."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from qmq_client import (
    BrokerAccessError,
    BrokerAddress,
    Consumers,
    Message,
    Producer,
    consumer,
    create_tables,
    pull,
)
from qmq_client.commands.doctor import doctor
from qmq_client.commands.groups import groups, lag
from qmq_client.commands.message import message
from qmq_client.commands.send import send
from qmq_client.commands.subjects import subjects
from qmq_client.commands.tail import tail
from qmq_client.settings.config import load_config
from qmq_watchdog.cli import watchdog
from tests.broker.face.guard import Authority, add_token
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

SUBJECT = "orders.eu"


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """A guarded broker, and `qmq.toml` in the working directory that leads to it."""
    monkeypatch.chdir(tmp_path)
    authority = Authority(tmp_path / "authority")
    tokens = tmp_path / "tokens.json"
    Path("token").write_text(add_token(tokens, "admin:orders.*")[1])
    options = ["--reserve-bytes", "0", "--tokens", str(tokens), *authority.server_options()]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        Path("qmq.toml").write_text(
            f'[broker]\nurl = "{broker.url}"\ntoken_file = "token"\nca_file = "{authority.file}"\n'
            '[[database]]\nname = "shop"\nurl = "sqlite:///shop.db"\n'
        )
        yield broker
        assert broker.stop() == 0
        assert Path("token").read_text() not in broker.log


def address() -> BrokerAddress:
    return BrokerAddress.of_section(load_config(environment={}).config.broker)


def pulled(subject: str, group: str, broker: BrokerAddress | None = None) -> int:
    with pull(broker or address(), subject=subject, group=group, start="earliest") as deliveries:
        for delivery in deliveries:
            delivery.ack()
        return len(deliveries)


def run(command: click.Command, *words: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(command, words)
    error = "" if isinstance(outcome.exception, SystemExit | None) else repr(outcome.exception)
    return outcome.exit_code, outcome.output + error


def test_producer_watchdog_consumers_and_pulls_are_let_in(broker: BrokerProcess) -> None:
    engine = sa.create_engine("sqlite:///shop.db")
    create_tables(engine)
    with Producer(engine, address()) as producer:
        producer.send_now(Message(SUBJECT, "by the producer"))
        assert producer.flush().accepted == 1
    with Producer(engine, "http://127.0.0.1:1") as elsewhere:
        elsewhere.send_now(Message(SUBJECT, "by the watchdog"))
        elsewhere.flush()
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE qmq_outbox SET due_at_ms = 0"))
    code, output = run(watchdog, "sweep", "--json")
    assert code == 0, output
    received: list[str] = []
    is_done = threading.Event()

    @consumer(SUBJECT, group="g", start="earliest", wait_ms=100)
    def on_order(order: Message) -> None:
        received.append(str(order.body))
        if len(received) == 2:
            is_done.set()

    with Consumers([on_order], address()):
        assert is_done.wait(DEADLINE_S)
    assert sorted(received) == ["by the producer", "by the watchdog"]
    assert pulled(SUBJECT, "another") == 2
    engine.dispose()


def test_every_command_is_let_in(broker: BrokerProcess) -> None:
    code, output = run(send, SUBJECT, "hello", "--json")
    assert code == 0, output
    for command, words in (
        (subjects, ["--json"]),
        (groups, ["--json"]),
        (lag, ["--json"]),
        (tail, [SUBJECT, "--json"]),
    ):
        code, output = run(command, *words)
        assert code == 0, (command.name, output)
    code, output = run(message, "find", "--subject", SUBJECT, "--key", "k", "--json")
    assert json.loads(output)["messages"] == []
    Path("qmq.toml").write_text(Path("qmq.toml").read_text().partition("[[database]]")[0])
    code, output = run(doctor, "--json")
    assert json.loads(output)["ok"], output


def test_what_the_token_may_not_do_is_said_with_a_remedy(broker: BrokerProcess) -> None:
    with pytest.raises(
        BrokerAccessError, match=r"has no role consumer for subject 'bills'.*--role"
    ):
        pulled("bills", "g")
    stranger = replace(address(), token="qmq_" + "0" * 81, token_file="")
    with pytest.raises(BrokerAccessError, match=r"401 unauthenticated.*QMQ_BROKER_TOKEN"):
        pulled(SUBJECT, "g", stranger)
    Path("token").write_text(stranger.token)
    Path("qmq.toml").write_text(Path("qmq.toml").read_text().partition("[[database]]")[0])
    code, output = run(doctor, "--broker", broker.url, "--json")
    assert code == 1
    assert "broker.access" in output
