"""A restore puts another SQLite file in the place of one that publisher and inbox have connections to."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client import AsyncInbox, Inbox, Message, Producer, ProducerOptions, create_tables
from qmq_client.testing import MemoryBroker, MemoryTransport

SUBJECT = "order.placed"
IDS = [bytes([number]) * 16 for number in range(3)]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A database with our tables, and a copy of it from before."""
    path, backup = tmp_path / "shop.db", tmp_path / "backup.db"
    engine = sa.create_engine(f"sqlite:///{path}")
    create_tables(engine)
    engine.dispose()
    shutil.copyfile(path, backup)
    return path, backup


def restore(path: Path, backup: Path) -> None:
    for name in (f"{path}-wal", f"{path}-shm"):
        Path(name).unlink(missing_ok=True)
    os.replace(backup, path)


def send(engine: sa.Engine, producer: Producer, body: str) -> None:
    with Session(engine) as session, session.begin():
        producer.send(Message(SUBJECT, body), session=session)


def test_S2_the_publisher_sends_what_is_in_the_file_that_came_in_place_of_another(
    files: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine, broker = sa.create_engine(f"sqlite:///{files[0]}"), MemoryBroker()
    options = ProducerOptions(background=False)
    with Producer(engine, MemoryTransport(broker), options=options) as producer:
        send(engine, producer, "old")
        assert producer.flush()
        restore(*files)
        engine.dispose()  # the application's own connections are its own affair
        send(engine, producer, "new")
        assert producer.flush()
        assert [message.body for message in broker.messages(SUBJECT)] == ["old", "new"]
        assert producer.stats.deleted == 2
    assert "was replaced or removed" in caplog.text
    engine.dispose()


def handled(path: Path) -> int:
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        count = connection.exec_driver_sql("SELECT count(*) FROM qmq_inbox").scalar_one()
    engine.dispose()
    return int(count)


def test_C5_the_inbox_notes_ids_in_the_file_that_came_in_place_of_another(
    files: tuple[Path, Path],
) -> None:
    engine = sa.create_engine(f"sqlite:///{files[0]}", pool_size=2)
    inbox = Inbox(engine, group="billing")

    def handle(message_id: bytes) -> set[bytes]:
        with inbox.open([message_id]) as work:
            return work.new

    assert handle(IDS[0]) == {IDS[0]}
    assert handle(IDS[0]) == set()
    restore(*files)
    assert handle(IDS[0]) == {IDS[0]}, "the backup knows nothing of it"
    assert handle(IDS[0]) == set()
    engine.dispose()
    assert handled(files[0]) == 1


def test_C5_so_does_an_asynchronous_inbox(files: tuple[Path, Path]) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{files[0]}")
        inbox = AsyncInbox(engine, group="billing")
        for message_ids in (IDS[:1], IDS):
            async with inbox.open(message_ids) as work:
                assert work.new == set(message_ids)
            if message_ids != IDS:
                restore(*files)
        await engine.dispose()

    asyncio.run(main())
    assert handled(files[0]) == len(IDS)
