"""The gate before the one connection of a database in memory."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy as sa

from qmq_client.outbox.database import shared_connection as module
from qmq_client.outbox.database.shared_connection import SharedConnection, shared_connection

#: What a thread has that must not get through; long enough for one that may.
MOMENT_S = 0.5


def test_two_threads_that_begin_at_once_get_one_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = sa.create_engine("sqlite://").pool
    gates: list[SharedConnection] = []
    others: list[threading.Thread] = []

    class Overtaken(SharedConnection):
        """A gate in whose making another thread asks for one."""

        def __init__(self) -> None:
            super().__init__()
            if not others:
                others.append(
                    threading.Thread(target=lambda: gates.append(shared_connection(pool)))
                )
                others[0].start()
                others[0].join(MOMENT_S)

    monkeypatch.setattr(module, "SharedConnection", Overtaken)
    gates.append(shared_connection(pool))
    others[0].join()
    assert len(gates) == 2
    assert gates[0] is gates[1]
