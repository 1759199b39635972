"""A JVM that dies, mostly because memory is short, is told in one line."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest
from py4j.clientserver import JavaClient, JavaParameters, PythonParameters
from py4j.java_gateway import GatewayProperty, PythonProxyPool
from py4j.protocol import ERROR, STRING_TYPE, Py4JError, get_return_value

from qmq_pipeline import command
from qmq_pipeline.command import running_job
from qmq_pipeline.spark import session
from qmq_pipeline.spark.explain import explain

if TYPE_CHECKING:
    from pathlib import Path


def call_nobody() -> None:
    """Call a JVM at a port that is this test's own and where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        there = JavaParameters(port=taken.getsockname()[1])
        pool = GatewayProperty(JavaParameters().auto_convert, PythonProxyPool())
        JavaClient(there, PythonParameters(), pool).send_command("")


def call_one_who_dies() -> None:
    """Call a JVM that takes the call and then is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # the end of the server
                while True:
                    server.accept()[0].close()

        thread = Thread(target=hang_up)
        thread.start()
        there = JavaParameters(port=server.getsockname()[1])
        pool = GatewayProperty(JavaParameters().auto_convert, PythonProxyPool())
        try:
            answer = JavaClient(there, PythonParameters(), pool).send_command("")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    get_return_value(answer, None, "o1", "count")


def test_the_bridge_s_own_traceback_is_not_shown_and_other_logs_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # a session of before has quietened it
    with pytest.raises(Py4JError):
        call_one_who_dies()
    assert [one.module for one in caplog.records] == ["java_gateway"], "it logs what it raises"
    caplog.clear()
    session.quieten()
    with pytest.raises(Py4JError) as lost:
        call_one_who_dies()
    logging.error("of the program")
    assert [one.message for one in caplog.records] == ["of the program"]
    assert "JVM ended in the middle" in str(explain(lost.value, ""))


class Orphan:
    """A session whose JVM is dead."""

    def stop(self) -> None:
        call_nobody()


def test_the_error_of_a_call_to_a_dead_jvm_says_what_to_do() -> None:
    with pytest.raises(OSError, match="refused") as refused:
        call_nobody()
    told = str(explain(refused.value, "/tmp/the.log"))
    assert told.startswith("Spark's JVM ended in the middle of its work")
    assert "Run the job again" in told
    assert "/tmp/the.log" in told
    assert "has room" in str(explain(ConnectionRefusedError("of something else"), ""))


def test_an_answer_that_does_not_come_is_reported_like_that_and_one_that_says_why_is_not() -> None:
    """The bridge makes an answer of its own of a line that breaks: an error without anything behind it."""
    with pytest.raises(Py4JError) as broken:
        get_return_value(ERROR, None, "o1", "count")
    assert "JVM ended in the middle" in str(explain(broken.value, ""))
    with pytest.raises(Py4JError) as said:
        get_return_value(f"{ERROR}{STRING_TYPE}no such method", None, "o1", "count")
    assert "no such method" in str(said.value)
    assert "JVM ended" not in str(explain(said.value, ""))


def test_a_command_whose_jvm_died_ends_with_that_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "get_session", Orphan)
    monkeypatch.setattr(session, "log_path", lambda: tmp_path / "the.log")
    monkeypatch.setattr(command, "watched_tasks", lambda *_: socket.socket())
    options: dict[str, Any] = {
        **dict.fromkeys(("path", "broker_url", "token_file", "config_file")),
        "tables": str(tmp_path),
        "wait_s": 0.0,
        "databases": (),
        "as_json": False,
        "quiet": True,
        "table_format": "parquet",
        "namespace": "",
    }

    def run() -> None:
        with running_job(options) as job:
            job.spark()
            call_nobody()

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "Spark's JVM ended in the middle" in line
    assert (tmp_path / "the.log").exists()
