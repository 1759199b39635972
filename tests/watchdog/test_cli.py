"""`qmq watchdog`: options, exit codes, JSON, signals, and that no secret is ever shown."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_watchdog.databases import Database
from tests.kit import warm
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, LOOK_S
from tests.services.another_user import (
    a_database_in,
    a_directory_of_root,
    as_nobody,
    let_everybody_write,
    let_nobody_write,
)
from tests.watchdog.rows import damage, left, make_database, put_rows

#: A port that nobody listens on: it was free a moment ago and is never bound.
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    ABSENT_BROKER = f"http://127.0.0.1:{probe.getsockname()[1]}"


def sweep(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(root, ["watchdog", "sweep", *arguments], env=environment)


def url(database: Database) -> str:
    return str(database.engine.url)


def as_json(result: Result) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def test_exit_0_when_everything_due_was_sent(
    database: Database, broker_process: BrokerProcess
) -> None:
    put_rows(database, 3)
    put_rows(database, 1, due_in_ms=60_000)
    result = sweep("--database", url(database), "--broker", broker_process.url)
    assert (result.exit_code, result.output) == (
        0,
        "sweep database=shop claimed=3 sent=3 failed=0 parked=0 held=0 lost=0 unreachable=false "
        "retry_after_s=0 is_cut_short=false rate_wait_s=0 parked_total=0\n",
    )
    assert len(left(database)) == 1


def test_exit_0_when_nothing_was_due_even_without_a_broker(database: Database) -> None:
    result = sweep("--database", url(database), "--broker", ABSENT_BROKER)
    assert result.exit_code == 0


def test_exit_1_when_a_row_was_parked(database: Database, broker_process: BrokerProcess) -> None:
    ids = put_rows(database, 3)
    damage(database, ids[1])
    result = sweep("--database", url(database), "--broker", broker_process.url, "--json")
    assert result.exit_code == 1
    found = as_json(result)
    assert (found["exit_code"], found["sent"], found["parked"]) == (1, 2, 1)


def test_the_line_says_why_rows_were_not_sent_and_how_many_wait_for_a_person(
    database: Database, broker_process: BrokerProcess
) -> None:
    ids = put_rows(database, 3)
    damage(database, ids[1])
    call = ("--database", url(database), "--broker", broker_process.url)
    assert 'last_error="damaged in the outbox' in sweep(*call).output
    again = sweep(*call)
    assert again.exit_code == 1, "the parked row still waits for a person"
    assert "parked=0" in again.output
    assert sweep(*call, "--ignore-parked").exit_code == 0
    assert "parked_total=1" in again.output


def test_exit_1_when_rows_are_left_at_the_bound_of_a_sweep(
    database: Database, broker_process: BrokerProcess
) -> None:
    put_rows(database, 5)
    result = sweep(
        "--database", url(database), "--broker", broker_process.url, "--batch-rows", "2",
        environment={"QMQ_WATCHDOG_SWEEP_ROWS_MAX": "4"},
    )  # fmt: skip
    assert result.exit_code == 1
    assert "is_cut_short=true" in result.output
    assert len(left(database)) == 1


def test_exit_1_when_the_broker_refuses_rows_that_are_tried_again(database: Database) -> None:
    put_rows(database, 2)
    with refusing(422, "odd") as broker_url:
        result = sweep("--database", url(database), "--broker", broker_url, "--json")
    assert result.exit_code == 1
    found = as_json(result)
    assert (found["claimed"], found["failed"], found["parked"]) == (2, 2, 0)
    assert len(left(database)) == 2


@contextmanager
def refusing(status: int, code: str) -> Iterator[str]:
    """A broker that takes nothing, for a reason of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            answer = json.dumps({"code": code, "message": "something is odd"}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("journal_mode", ["delete", "wal"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_W6_exit_3_for_a_file_that_may_only_be_read_while_nothing_is_due(
    what: str, journal_mode: str
) -> None:
    with a_directory_of_root() as folder:
        path = a_database_in(folder, journal_mode)
        refused = path if what == "file" else folder
        call = ("--database", f"sqlite:///{path}", "--broker", ABSENT_BROKER)
        assert sweep(*call).exit_code == 0
        let_nobody_write(path, what)
        with as_nobody():
            result = sweep(*call)
        assert f"{refused} is not writable for this user" in result.output
        assert result.exit_code == 3
        let_everybody_write(folder)
        with as_nobody():
            assert sweep(*call).exit_code == 0


def test_exit_2_for_a_wrong_call() -> None:
    assert sweep("--databse", "x").exit_code == 2


def test_exit_2_without_a_database() -> None:
    result = sweep()
    assert result.exit_code == 2
    assert "database: none is configured" in result.output


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-rows", "0"), ("--max-attempts", "-1"), ("--lease-ms", "0")]
)
def test_exit_2_for_a_value_that_cannot_work(database: Database, option: str, value: str) -> None:
    result = sweep("--database", url(database), option, value)
    assert result.exit_code == 2
    assert f"watchdog.{option[2:].replace('-', '_')}: '{value}' from command line" in result.output


def test_exit_2_for_a_database_without_the_tables(
    tmp_path: Path, broker_process: BrokerProcess
) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'bare.db'}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id INTEGER)")
    engine.dispose()
    result = sweep(
        "--database", f"sqlite:///{tmp_path / 'bare.db'}", "--broker", broker_process.url
    )
    assert result.exit_code == 2
    assert "qmq db migrate" in result.output


def test_W7_an_unknown_revision_is_refused_with_exit_2_and_the_others_are_swept(
    database: Database, tmp_path: Path, broker_process: BrokerProcess
) -> None:
    newer = make_database(tmp_path / "newer.db")
    with newer.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE qmq_version (version_num VARCHAR(32))")
        connection.exec_driver_sql("INSERT INTO qmq_version VALUES ('qmq9999')")
    for each in (database, newer):
        put_rows(each, 2)
    result = sweep(
        "--database", url(newer), "--database", url(database),
        "--broker", broker_process.url, "--json",
    )  # fmt: skip
    assert result.exit_code == 2
    found = {each["database"]: each for each in as_json(result)["databases"]}
    assert "qmq9999" in found["newer"]["error"]
    assert "this program is older and must be upgraded" in found["newer"]["error"]
    assert (found["newer"]["claimed"], found["shop"]["sent"]) == (0, 2)
    newer.close()


def test_exit_3_when_the_broker_is_not_there(database: Database) -> None:
    ids = put_rows(database, 3)
    result = sweep("--database", url(database), "--broker", ABSENT_BROKER, "--json")
    assert result.exit_code == 3
    found = as_json(result)["databases"][0]
    assert (found["claimed"], found["failed"], found["unreachable"]) == (3, 3, True)
    assert left(database) == set(ids)


def test_exit_3_when_a_database_is_not_there_and_the_others_are_swept(
    database: Database, tmp_path: Path, broker_process: BrokerProcess
) -> None:
    put_rows(database, 3)
    missing = tmp_path / "missing.db"
    result = sweep(
        "--database", f"sqlite:///{missing}", "--database", url(database),
        "--broker", broker_process.url, "--json",
    )  # fmt: skip
    assert result.exit_code == 3
    found = {each["database"]: each for each in as_json(result)["databases"]}
    assert found["shop"]["sent"] == 3
    assert "there is no file" in found["missing"]["error"]
    assert not missing.exists(), "a slip in the name creates no database"


def test_databases_come_from_the_configuration_and_may_be_chosen_by_name(
    tmp_path: Path, broker_process: BrokerProcess
) -> None:
    databases = {name: make_database(tmp_path / f"{name}.db") for name in ("orders", "stock")}
    for database in databases.values():
        put_rows(database, 1)
    lines = [f'[broker]\nurl = "{broker_process.url}"']
    lines += [
        f'[[database]]\nname = "{name}"\nurl = "{url(database)}"'
        for name, database in databases.items()
    ]
    config = tmp_path / "qmq.toml"
    config.write_text("\n".join(lines))
    result = sweep("--config", str(config), "--database", "stock")
    assert result.exit_code == 0, result.output
    assert [len(left(database)) for database in databases.values()] == [1, 0]
    assert sweep("--config", str(config)).exit_code == 0
    assert [len(left(database)) for database in databases.values()] == [0, 0]
    for database in databases.values():
        database.close()


@pytest.mark.parametrize(
    ("shown", "exit_code"),
    [
        ("postgresql+psycopg://app:hunter2@db/shop", 3),
        ("mysql+pymysql://app:hun%40ter2@db/shop?x=1", 3),
        ("mysql+pymysql://app:hun@ter2@db/shop?x=1", 2),  # an @ that is not escaped is refused
    ],
)
def test_no_password_is_ever_shown(shown: str, exit_code: int) -> None:
    result = sweep("--database", shown)
    assert result.exit_code == exit_code, result.output
    assert "ter2" not in result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_daemon_stops_cleanly_on_a_signal(
    database: Database, broker_process: BrokerProcess, number: signal.Signals
) -> None:
    command = ["qmq_client.cli", "watchdog", "run"]
    command += ["--database", url(database), "--broker", broker_process.url]
    daemon = warm.start(command, stderr=subprocess.PIPE)
    assert daemon.stderr is not None
    started = daemon.stderr.readline()
    daemon.send_signal(number)
    _, log = daemon.communicate(timeout=DEADLINE_S)
    assert f"watchdog.started databases=shop count=1 broker={broker_process.url} " in started
    assert 'broker_from="command line" ' in started
    assert log.rstrip().endswith("watchdog.stopped")
    assert daemon.returncode == 0


def test_the_daemon_refuses_a_wrong_configuration_at_once() -> None:
    result = CliRunner().invoke(root, ["watchdog", "run", "--database", "orders"])
    assert result.exit_code == 2
    assert "orders: not known (in --database)" in result.output


@pytest.mark.parametrize("option", [["--metrics-listen", "127.0.0.1:0"], ["--poll-s", "3"]])
def test_a_single_pass_refuses_what_only_the_daemon_has_a_use_for(
    option: list[str], tmp_path: Path
) -> None:
    words = [
        "watchdog",
        "run",
        "--once",
        "--database",
        f"sqlite:///{tmp_path / 'shop.db'}",
        *option,
    ]
    result = CliRunner().invoke(root, words)
    assert result.exit_code == 2
    assert f"{option[0]}: given with --once" in result.output
