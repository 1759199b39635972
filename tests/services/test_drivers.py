"""Each driver of the table reaches its database, here or in its own environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.conftest import MakeDatabase
from tests.services.drivers import DRIVERS, Driver, drivers, drivers_apart, environment_apart

_ASK = "import {0}, sys; sys.exit(not {0}.__file__.startswith({1!r}))"


@pytest.mark.parametrize("driver", drivers(), ids=str)
def test_a_driver_reaches_a_database(driver: Driver, make_database: MakeDatabase) -> None:
    url = driver.url(make_database(driver.kind).url)

    async def ask() -> object:
        engine = create_async_engine(url)
        async with engine.connect() as connection:
            found = await connection.scalar(sa.select(1))
        await engine.dispose()
        return found

    if driver.is_async:
        assert asyncio.run(ask()) == 1
        return
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        assert connection.dialect.driver == driver.name
        assert connection.scalar(sa.select(1)) == 1
    engine.dispose()


@pytest.mark.timeout(700)
@pytest.mark.parametrize("driver", drivers_apart(), ids=str)
def test_a_driver_apart_is_found_before_the_packages_of_the_tests(driver: Driver) -> None:
    environment = environment_apart(driver.apart, driver.debian)
    ask = _ASK.format(driver.module, environment["PYTHONPATH"])
    assert subprocess.run([sys.executable, "-c", ask], env=environment, timeout=60).returncode == 0


def test_each_driver_is_here_or_has_an_environment_of_its_own() -> None:
    assert sorted(map(str, drivers() + drivers_apart())) == sorted(map(str, DRIVERS))
