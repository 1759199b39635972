"""Reading the registry again and again: what is told once, and what is told anew."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qmq_client.database.registry import Registry
from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import DatabaseSection, RegistrySection
from qmq_watchdog.daemon import Daemon
from qmq_watchdog.fleet import Fleet, RegistryJob
from qmq_watchdog.options import DaemonOptions


def open_well(section: DatabaseSection) -> Any:
    return SimpleNamespace(name=section.name, server="db", close=lambda: None)


def refuse(section: DatabaseSection) -> Any:
    raise ConfigurationError(setting=section.name, value="wrong", remedy="Mend it.")


def test_a_registry_that_is_back_is_read_at_its_own_pace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(RegistrySection(url=f"sqlite:///{tmp_path / 'control.db'}"), {})
    fleet = Fleet(Daemon(), open_well)
    job = RegistryJob(registry, fleet, DaemonOptions(), refresh_s=5.0, random=lambda: 0.0)
    for expected_s in (1.0, 2.0):
        job.step(lambda: False)
        assert (job.is_well, job.is_in_trouble, job.delay_s) == (False, True, expected_s)
    registry.create()
    with caplog.at_level(logging.INFO):
        job.step(lambda: False)
    assert (job.is_well, job.is_in_trouble, job.trouble, job.delay_s) == (True, False, "", 5.0)
    assert "registry.recovered failures=2" in caplog.text


def test_a_database_is_refused_once_and_again_when_it_was_right_in_between(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ways = [refuse]

    def open_job(section: DatabaseSection) -> Any:
        return ways[-1](section)

    fleet = Fleet(Daemon(), open_job)
    fleet.set_configured(())
    shop = DatabaseSection(name="shop", url="postgresql://app@db/shop")
    told = []
    for way in (refuse, refuse, open_well, refuse):
        ways.append(way)
        fleet.set_registered([shop])
        told.append(caplog.text.count("database.refused"))
        if way is open_well:
            fleet.set_registered(())
    assert told == [1, 1, 1, 2]
