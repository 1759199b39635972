"""Drivers and a series of SQLAlchemy that cannot stand among the packages of the other tests.

Each is installed into a folder of its own, and tests of the outbox run with it in a process of their
own, on the same servers.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa

from tests.services.databases import Databases
from tests.services.drivers import Driver, drivers_apart, environment_apart
from tests.services.ladder import VARIABLES

ROOT: Final = Path(__file__).resolve().parents[3]
IS_NEWER_HERE: Final = sa.__version__.startswith("2.1")
OTHER: Final = "sqlalchemy[asyncio]<2.1" if IS_NEWER_HERE else "sqlalchemy[asyncio]>=2.1,<2.2"
PROGRAMS: Final = "tests/client/outbox/test_programs.py"
KILLS: Final = "tests/faults/test_killed_server.py"
#: All that stands on SQLAlchemy, for a release.
ALL: Final = ("tests/client/outbox", "tests/client/test_transactional.py")
#: Drivers of which few programs are run, one for each database and way.
FEW: Final = "session and (pysqlite or asyncmy or psycopg2 or asyncpg)"


def run(environment: dict[str, str], databases: Databases, *asked: str) -> str:
    """Run tests in this environment, on the servers of this run; what pytest says of them."""
    told = {name: databases.service(kind).url for kind, name in VARIABLES.items()}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *asked]
    done = subprocess.run(
        line, env={**environment, **told}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    return done.stdout


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("driver", drivers_apart(), ids=str)
def test_S1_S2_S11_programs_and_killed_servers_hold_with_a_driver_apart(
    driver: Driver, databases: Databases, pytestconfig: pytest.Config
) -> None:
    environment = environment_apart(driver.apart, driver.debian)
    more = ["--release"] if pytestconfig.getoption("--release") else []
    run(environment, databases, PROGRAMS, KILLS, "-k", f"{driver.name}- or {driver.name}]", *more)


@pytest.mark.timeout(3600)
def test_S1_S2_S11_programs_hold_with_the_other_series_of_sqlalchemy(
    databases: Databases, pytestconfig: pytest.Config
) -> None:
    environment = environment_apart([OTHER])
    asked = f"import sqlalchemy; assert sqlalchemy.__version__ != {sa.__version__!r}"
    subprocess.run([sys.executable, "-c", asked], check=True, env=environment)
    if pytestconfig.getoption("--release"):
        run(environment, databases, *ALL, f"--deselect={Path(__file__).relative_to(ROOT)}")
    else:
        run(environment, databases, PROGRAMS, "-k", FEW)
