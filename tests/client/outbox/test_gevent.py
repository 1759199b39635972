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
from tests.conftest import MakeDatabase
from tests.kit.pairing import pairs
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import KINDS
from tests.services.drivers import environment_apart

#: As many as the shop places.
ORDERS = 100


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Both ways, and each kind of database; before a release each with each."""
    metafunc.parametrize(("kind", "way"), pairs(metafunc.config, KINDS, ("session", "core")))


@pytest.mark.timeout(600)
def test_S1_S5_orders_of_greenlets_are_all_placed_and_sent(
    kind: str, way: str, make_database: MakeDatabase
) -> None:
    database = make_database(kind)
    environment = environment_apart(["gevent>=24.2"])
    set_up(database.url)
    patched = [sys.executable, "-m", "gevent.monkey", "--module"]
    line = [*patched, "tests.client.outbox.gevent_shop", database.url, way]
    done = subprocess.run(
        line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.stdout, done.returncode) == (f"{ORDERS}\n", 0), done.stderr
    truth = Truth(database.url)
    assert truth.read("SELECT count(*) FROM business_order") == [(ORDERS,)]
    assert truth.read(f"SELECT count(*) FROM {OUTBOX}") == [(0,)]
