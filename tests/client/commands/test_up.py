"""`qmq up`: a broker and a watchdog as processes of their own, which begin and end together."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from qmq_client import Message, Producer, ProducerOptions, pull
from qmq_client.commands.exit_codes import DONE, WRONG_CALL
from qmq_client.commands.root import root
from tests.kit.broker_process import BrokerProcess
from tests.kit.ports import free_port
from tests.kit.waiting import wait_for

UP = ("-m", "qmq_client", "up")
IN_USE = 3


@contextmanager
def up(tmp_path: Path, *words: str) -> Iterator[BrokerProcess]:
    """Its lines are those of its children, and it listens as the broker does."""
    running = BrokerProcess(tmp_path / "data", *words, command=UP)
    running.start()
    try:
        yield running
        children = children_of(running)
    finally:
        for child in children_of(running):
            os.kill(child, signal.SIGKILL)
        running.clean_up()
    assert not children, "a child is left"


def children_of(running: BrokerProcess) -> list[int]:
    """Its processes; none when it has ended."""
    try:
        told = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in told.split()]


def wait_for_in_log(running: BrokerProcess, text: str) -> None:
    """Both start at once, so a line of the watchdog may stand before that with the broker's address."""
    wait_for(lambda: text in running.log, lambda: f"no {text!r} in {running.log}")


def test_it_sends_what_was_left_behind_and_stops_with_one_signal(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with up(tmp_path, "--database", url, "--migrate") as running:
        options = ProducerOptions(background=False, takeover_ms=1_000)
        engine = sa.create_engine(url)
        message_id = Producer(engine, running.url, options=options).send_now(Message("order", "17"))
        engine.dispose()
        with pull(running.url, subject="order", group="all", wait_s=30) as (delivery,):
            assert delivery.message.message_id == message_id
        assert running.stop() == DONE
    assert " stopped " in running.log
    assert "watchdog.stopped" in running.log


def test_an_existing_configuration_says_where_and_for_whom(tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "qmq.toml"
    config.write_text(
        f'[broker]\nurl = "http://127.0.0.1:{port}"\n'
        f'[[database]]\nname = "shop"\nurl = "sqlite:///{tmp_path / "shop.db"}"\n'
    )
    words = ("--config", str(config), "--migrate")
    running = BrokerProcess(tmp_path / "data", *words, command=UP, listen=f"127.0.0.1:{port}")
    with running:
        assert running.port == port
        wait_for_in_log(running, "watchdog.started databases=shop")
        assert running.stop() == DONE


def test_without_a_database_the_broker_runs_alone(tmp_path: Path) -> None:
    with up(tmp_path) as running:
        assert "no watchdog runs" in running.log
        assert len(children_of(running)) == 1
        assert running.stop() == DONE


def test_a_second_signal_does_not_wait_for_what_is_under_way(tmp_path: Path) -> None:
    with up(tmp_path) as running, socket.create_connection((running.host, running.port)) as slow:
        slow.sendall(b"POST /v1/send HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf")
        running.send_signal(signal.SIGTERM)
        running.wait_for(" stopping ")
        running.send_signal(signal.SIGINT)
        running.wait_for(" forced ")
        assert running.wait() == 1


def test_when_one_ends_by_itself_so_does_the_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    with up(tmp_path, "--database", url, "--migrate") as running:
        wait_for_in_log(running, "watchdog.started")
        broker, _ = children_of(running)
        os.kill(broker, signal.SIGKILL)
        assert running.wait() == 128 + signal.SIGKILL
    assert "The broker ended with exit code 137." in running.log
    assert "watchdog.stopped" in running.log


def test_what_the_broker_refuses_is_refused_with_its_exit_code(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data"):
        second = BrokerProcess(tmp_path / "data", command=UP)
        assert second.run_to_end() == IN_USE
    assert "The broker ended with exit code 3." in second.log


@pytest.mark.parametrize(
    ("listen", "words", "told"),
    [
        ("127.0.0.1:9470", ["--migrate"], "no database is configured"),
        ("127.0.0.1:9470", ["--migrate", "--database", "oracle://a/b"], "oracle"),
        ("127.0.0.1", [], "Give HOST:PORT"),
        ("127.0.0.1:0", [], "broker.url"),
        ("127.0.0.1:9470/below", [], "below a path"),
    ],
)
def test_a_wrong_call_starts_nothing(
    listen: str, words: list[str], told: str, tmp_path: Path
) -> None:
    refused = BrokerProcess(tmp_path / "data", *words, command=UP, listen=listen)
    assert refused.run_to_end() == WRONG_CALL
    assert told in refused.log
    assert not (tmp_path / "data").exists()


def test_a_broker_url_with_tls_is_served_in_another_way() -> None:
    environment = {"QMQ_BROKER_URL": "https://broker.example:9470"}
    refused = CliRunner().invoke(root, ["up"], env=environment)
    assert refused.exit_code == WRONG_CALL
    assert "qmq broker serve" in refused.stderr
