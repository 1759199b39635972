"""A killed server has its data again, and a run whose workers were killed leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.conftest import MakeServer
from tests.kit.waiting import wait_for
from tests.services import keeper
from tests.services.keeper import is_ours
from tests.services.ladder import find_service
from tests.services.private import PrivateServer
from tests.services.run import TestRun

DEADLINE_S = 100.0
ROOT = Path(__file__).resolve().parents[2]
SERVERS = pytest.mark.parametrize("kind", ["mysql", "postgresql"])


def engine_of(server: PrivateServer) -> sa.Engine:
    return sa.create_engine(server.url(), poolclass=sa.pool.NullPool)


def count(engine: sa.Engine) -> int:
    with engine.connect() as connection:
        found: int = connection.exec_driver_sql("SELECT count(*) FROM kept").scalar_one()
        return found


@SERVERS
def test_a_killed_server_comes_back_with_what_was_committed(
    make_private_server: MakeServer, kind: str
) -> None:
    server = make_private_server(kind)
    engine, port = engine_of(server), server.port
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE kept (id INTEGER PRIMARY KEY)")
        connection.exec_driver_sql("INSERT INTO kept VALUES (1)")
    with engine.connect() as connection:
        connection.exec_driver_sql("INSERT INTO kept VALUES (2)")
        server.kill()
        connection.invalidate()
    with pytest.raises(sa.exc.OperationalError):
        count(engine)
    server.start()
    assert (count(engine), server.port) == (1, port)
    server.restart()
    assert count(engine) == 1


def test_a_server_that_starts_leaves_the_temporary_tables_of_others_alone(
    make_private_server: MakeServer,
) -> None:
    first = engine_of(make_private_server("mysql"))
    with first.connect() as connection:
        connection.exec_driver_sql("CREATE TEMPORARY TABLE brief (id INTEGER) ENGINE=MyISAM")
        scratch = Path(connection.exec_driver_sql("SELECT @@tmpdir").scalar_one())
        files = sorted(scratch.iterdir())
        assert files
        make_private_server("mysql")
        assert sorted(scratch.iterdir()) == files


@SERVERS
def test_a_frozen_server_says_nothing_and_continues_when_thawed(
    make_private_server: MakeServer, kind: str
) -> None:
    server = make_private_server(kind)
    server.freeze()
    patience: dict[str, int] = {"connect_timeout": 2}
    if kind == "mysql":
        patience["read_timeout"] = 2  # the other ends when the kernel has accepted
    hasty = sa.create_engine(server.url(), connect_args=patience)
    with pytest.raises(sa.exc.OperationalError):
        hasty.connect()
    hasty.dispose()
    server.thaw()
    with engine_of(server).connect() as connection:
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1


@SERVERS
def test_every_commit_is_on_disk(make_private_server: MakeServer, kind: str) -> None:
    engine = engine_of(make_private_server(kind))
    wanted: dict[str, dict[str, object]] = {
        "mysql": {"SELECT @@innodb_flush_log_at_trx_commit": 1},
        "postgresql": {"SHOW fsync": "on", "SHOW synchronous_commit": "on"},
    }
    with engine.connect() as connection:
        for query, value in wanted[kind].items():
            assert connection.exec_driver_sql(query).scalar() == value


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@SERVERS
def test_a_closed_server_leaves_no_process_and_no_file(
    make_private_server: MakeServer, kind: str
) -> None:
    server = make_private_server(kind)
    process, folder = server.process, server.folder
    segment = segment_of(server)
    assert (segment in segments()) == (kind == "postgresql")
    server.close()
    # It goes with the last of PostgreSQL's processes, which see only in a while that theirs was killed.
    wait_for(lambda: segment not in segments(), "the memory is given back")
    assert process is not None
    assert not is_ours(process, str(folder))
    assert not folder.exists()


def test_a_server_that_ends_while_it_is_told_to_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the keeper would end with an error, and leave the other servers and the folder behind."""
    looks, told = [True, True], list[int]()

    def gone(_: int, kind: int) -> None:
        told.append(kind)
        raise ProcessLookupError

    monkeypatch.setattr(keeper, "is_ours", lambda *_: bool(looks and looks.pop()))
    monkeypatch.setattr(os, "kill", gone)
    keeper.end(4242, "folder")
    assert told == [signal.SIGTERM] * 2


def segment_of(server: PrivateServer) -> str:
    """The piece of the kernel's memory by which a PostgreSQL knows that it runs; it outlives it."""
    path = server.folder / "data" / "postmaster.pid"
    return path.read_text().splitlines()[6].split()[1] if path.exists() else "none"


def segments() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines}


def worker(name: str, *kinds: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.services.test_private", name, *kinds]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@SERVERS
def test_workers_share_a_server_that_goes_with_the_last_of_them_though_killed(kind: str) -> None:
    name = os.urandom(6).hex()
    workers = [worker(name, kind) for _ in range(2)]
    answers = [said(process) for process in workers]
    assert len({tuple(answer[:3]) for answer in answers}) == 1
    url, shared, folder, _ = answers[0]
    workers[0].send_signal(signal.SIGKILL)
    workers[0].communicate(timeout=DEADLINE_S)
    assert is_ours(int(shared), folder)
    sa.create_engine(url, poolclass=sa.pool.NullPool).connect().close()
    workers[1].send_signal(signal.SIGKILL)
    workers[1].communicate(timeout=DEADLINE_S)
    postmasters = {int(number) for number in (shared, *(answer[3] for answer in answers))}
    wait_for(lambda: not any(is_ours(number, folder) for number in postmasters))
    wait_for(lambda: not Path(folder).exists())


def be_a_worker(name: str, kind: str) -> None:
    """Say where the shared server is, start a private one too, and stay."""
    from tests.services.databases import Databases

    run = TestRun(name)
    databases = Databases()
    databases._run = run
    url = find_service(run, kind).url
    with run.alone():
        noted = run.noted(f"server-{kind}")
    private = databases.private_server(kind)
    private.start()
    print(url, noted and noted["process"], run.folder, private.process, flush=True)
    signal.pause()


if __name__ == "__main__":
    be_a_worker(sys.argv[1], sys.argv[2])
