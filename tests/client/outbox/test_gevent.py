"""Greenlets in place of threads: nobody waits inside a transaction for something of ours.

Who waits there lets the other greenlets run, and on SQLite they wait for the lock of that transaction without
letting anybody run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.client.outbox.test_environments import ROOT
from tests.client.truth import Truth
from tests.client.world import OUTBOX, set_up
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database
from tests.services.drivers import environment_apart

#: As many as the shop places.
ORDERS = 100


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["session", "core"])
def test_S1_S5_orders_of_greenlets_are_all_placed_and_sent(a_database: Database, way: str) -> None:
    environment = environment_apart(["gevent>=24.2"])
    set_up(a_database.url)
    patched = [sys.executable, "-m", "gevent.monkey", "--module"]
    line = [*patched, "tests.client.outbox.gevent_shop", a_database.url, way]
    done = subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.stdout, done.returncode) == (f"{ORDERS}\n", 0), done.stderr
    truth = Truth(a_database.url)
    assert truth.read("SELECT count(*) FROM business_order") == [(ORDERS,)]
    assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
