"""Whoever mistakes an address, a setting or an option is told what is wrong with it, and the way on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qmq_client.commands.root import root
from tests.broker.face.guard import Authority
from tests.kit.broker_process import BrokerProcess


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, and no word of a broker in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("QMQ_BROKER_URL", "QMQ_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def refused(*words: str, exit_code: int) -> str:
    """What a command says on its way out, on one line."""
    ended = CliRunner().invoke(root, [*words])
    assert ended.exit_code == exit_code, ended.output
    return " ".join(ended.stderr.split())


@pytest.mark.parametrize(
    "words", [("subjects",), ("send", "a", "b"), ("tail", "a"), ("dead", "list", "a", "b")]
)
def test_without_a_broker_the_answer_is_what_to_start_or_to_give(
    nobody: str, words: tuple[str, ...]
) -> None:
    told = refused(*words, "--broker", nobody, exit_code=3)
    assert "no connection: 'Connection refused'. Start a broker there, or give the address" in told


def test_http_for_a_broker_that_speaks_tls_and_the_other_way_round_say_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    with BrokerProcess(tmp_path / "tls", *authority.server_options()) as broker:
        plain = f"http://127.0.0.1:{broker.port}"
        told = refused("subjects", "--broker", plain, exit_code=3)
        assert "If the broker speaks TLS, its address begins with https://." in told
        told = refused("subjects", "--broker", broker.url, exit_code=3)
        assert "Give the authority that signed it (broker.ca_file)" in told
        monkeypatch.setenv("QMQ_BROKER_CA_FILE", str(authority.file))
        assert CliRunner().invoke(root, ["subjects", "--broker", broker.url]).stdout == "none\n"
    with BrokerProcess(tmp_path / "plain") as broker:
        told = refused("subjects", "--broker", f"https://127.0.0.1:{broker.port}", exit_code=3)
        assert "The server there does not speak TLS: begin the address with http://." in told


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9470", "ftp://127.0.0.1", "", "http://127.0.0.1:99999", "http://a:b"]
)
def test_S7_an_address_that_is_none_is_answered_with_one_that_is(url: str) -> None:
    told = refused("subjects", "--broker", url, exit_code=2)
    assert told.endswith("from command line. Use a URL like http://127.0.0.1:9470.")


def test_without_a_database_the_answer_is_how_one_is_given() -> None:
    for words in (("db", "migrate"), ("outbox", "list")):
        told = refused(*words, exit_code=2)
        assert "none is configured. Give --database with a URL like sqlite:///shop.db" in told


def test_a_span_of_retention_is_refused_in_the_unit_in_which_it_was_given(tmp_path: Path) -> None:
    for hours in ("-1", "0", "1e9"):
        words = ("broker", "serve", "--data", str(tmp_path / "data"), "--retain-hours", hours)
        told = refused(*words, exit_code=2)
        assert f"'--retain-hours': {float(hours):g}; allowed: 0.0003 (a second)" in told
    assert not (tmp_path / "data").exists()


def test_a_kind_of_file_that_is_none_is_answered_with_all_there_are(tmp_path: Path) -> None:
    told = refused("store", "dump", "nonsense", str(tmp_path), exit_code=2)
    assert "Invalid value for 'KIND': 'nonsense' is not one of 'actions', " in told


def test_who_types_a_message_learns_that_it_is_waited_for_and_how_to_end(
    tmp_path: Path,
) -> None:
    keyboard, terminal = os.openpty()
    with BrokerProcess(tmp_path / "data") as broker:
        command = [sys.executable, "-m", "qmq_client", "send", "orders", "--broker", broker.url]
        with subprocess.Popen(
            command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as typing:
            try:
                os.close(terminal)
                assert typing.stderr is not None
                assert typing.stderr.readline() == "reading standard input; end it with Ctrl-D\n"
                os.write(keyboard, b"hello\n\x04")
                assert typing.wait(60) == 0
            finally:
                typing.kill()
        os.close(keyboard)
        assert (
            CliRunner()
            .invoke(root, ["tail", "orders", "--broker", broker.url])
            .stdout.endswith("hello\\n\n")
        )
