"""The registry: rows come and go while the watchdog runs, and no secret is in them."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.database.registry import Registry
from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import DATABASES_MAX
from qmq_client.settings.sections import (
    BrokerSection,
    Config,
    DatabaseSection,
    RegistrySection,
    WatchdogSection,
)
from qmq_client.signal_flag import SignalFlag
from qmq_watchdog.collector import WatchdogCollector
from qmq_watchdog.service import Service
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S
from tests.services.databases import Database as ServedDatabase
from tests.watchdog.rows import left, make_database, put_rows


def a_registry(tmp_path: Path, **settings: Any) -> Registry:
    section = RegistrySection(url=f"sqlite:///{tmp_path / 'control.db'}", **settings)
    registry = Registry(section, {})
    registry.create()
    return registry


def section_of(name: str, **settings: Any) -> DatabaseSection:
    return DatabaseSection(name=name, **{"url": "postgresql://app@db/shop", **settings})


def test_rows_are_written_read_changed_and_removed(a_database: ServedDatabase) -> None:
    registry = Registry(RegistrySection(url=a_database.url), {})
    assert registry.create()
    assert not registry.create(), "it may be asked for again"
    orders = section_of(
        "orders", password_env="ORDERS_PASSWORD", schema="sales", rows_per_s=5, keep_sent_s=60.5
    )
    assert registry.add(orders)
    assert registry.add(section_of("stock"), is_enabled=False)
    assert registry.read().enabled() == [orders]
    assert registry.set_enabled("stock", is_enabled=True)
    assert [each.name for each in registry.read().enabled()] == ["orders", "stock"]
    changed = section_of("orders", rows_per_s=6)
    assert not registry.add(changed), "one of this name was there"
    assert registry.read().enabled()[0] == changed
    assert registry.remove("orders")
    assert not registry.remove("orders")
    assert not registry.set_enabled("orders", is_enabled=True)


def test_names_that_differ_in_capitals_are_two_rows(a_database: ServedDatabase) -> None:
    registry = Registry(RegistrySection(url=a_database.url), {})
    registry.create()
    assert [registry.add(section_of(name)) for name in ("shop", "Shop")] == [True, True]
    assert registry.remove("shop")
    assert [each.name for each in registry.read().enabled()] == ["Shop"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "postgresql://app:hunter2@db/shop"}, "has a password in it"),
        ({"url": "postgresql://db/shop?user=app&password=hunter2"}, "has a password in it"),
        ({"url": "://app:hunter2@x"}, "not a database URL"),
        ({"password_env": "HOME"}, "name contains PASSWORD"),
        ({"password_env": "AWS_SECRET_ACCESS_KEY"}, "name contains PASSWORD"),
        ({"password_file": "/etc/shadow"}, "password_file is not allowed"),
    ],
)
def test_no_secret_gets_into_the_table_and_none_may_be_fished_out_through_it(
    tmp_path: Path, settings: dict[str, str], problem: str
) -> None:
    registry = a_registry(tmp_path)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        registry.add(section_of("orders", **settings))
    assert "hunter2" not in str(caught.value)
    assert registry.read().databases == []


def test_a_password_file_must_be_in_the_directory_that_was_configured(tmp_path: Path) -> None:
    registry = a_registry(tmp_path, password_directory=str(tmp_path / "secrets"))
    for path in (tmp_path / "elsewhere", tmp_path / "secrets" / ".." / "elsewhere"):
        with pytest.raises(ConfigurationError, match="password_directory"):
            registry.add(section_of("orders", password_file=str(path)))
    assert registry.add(section_of("orders", password_file=str(tmp_path / "secrets" / "orders")))


def test_a_row_that_somebody_wrote_by_hand_is_checked_when_it_is_read(tmp_path: Path) -> None:
    registry = a_registry(tmp_path, password_directory=str(tmp_path))
    registry.add(section_of("good"))
    with closing(sqlite3.connect(tmp_path / "control.db")) as connection, connection:
        for name, url, prefix, password_file in (
            ("secret", "mysql://app:hunter2@db/shop", "qmq_", ""),
            ("injected", "mysql://db/shop", "x; DROP TABLE y", ""),
            ("no_path", "mysql://db/shop", "qmq_", f"{tmp_path}/\0"),
        ):
            connection.execute(
                "INSERT INTO qmq_database (name, url, table_prefix, password_file) "
                "VALUES (?, ?, ?, ?)",
                (name, url, prefix, password_file),
            )
    content = registry.read()
    assert [each.name for each in content.enabled()] == ["good"]
    assert set(content.refused) == {"secret", "injected", "no_path"}
    assert "hunter2" not in str(content.refused["secret"])


def test_a_registry_without_its_table_says_how_to_make_it(tmp_path: Path) -> None:
    (tmp_path / "control.db").touch()
    registry = Registry(RegistrySection(url=f"sqlite:///{tmp_path / 'control.db'}"), {})
    with pytest.raises(ConfigurationError) as refused:
        registry.read()
    assert str(refused.value) == (
        "registry.table: database registry: no such table: qmq_database. "
        "Run `qmq watchdog databases init`."
    )


def test_rows_that_are_too_many_are_reported_and_not_merely_left_out(tmp_path: Path) -> None:
    registry = a_registry(tmp_path)
    names = [f"shop-{number:04}" for number in range(DATABASES_MAX + 1)]
    with closing(sqlite3.connect(tmp_path / "control.db")) as connection, connection:
        connection.executemany(
            "INSERT INTO qmq_database (name, url) VALUES (?, 'postgresql://app@db/shop')",
            [(name,) for name in names],
        )
    content = registry.read()
    assert [each.name for each in content.enabled()] == names[:-1]
    (told,) = content.refused.values()
    assert f"more than 2,000 rows; those after {names[-2]} are left out" in str(told)
    registry.remove(names[0])
    assert registry.read().refused == {}


class Told(logging.Handler):
    """Waits for an event of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.events.append(getattr(record, "qmq", {}))
            self._changed.notify_all()

    def wait_for(self, event: str, database: str = "") -> None:
        def is_there() -> bool:
            return any(
                each.get("event") == event and each.get("database", "") == database
                for each in self.events
            )

        with self._changed:
            assert self._changed.wait_for(is_there, DEADLINE_S), self.events
            self.events.clear()


def test_databases_are_added_changed_disabled_and_removed_without_a_restart(
    tmp_path: Path, broker_process: BrokerProcess
) -> None:
    databases = {name: make_database(tmp_path / f"{name}.db") for name in ("a", "b")}
    sections = {
        name: section_of(name, url=f"sqlite:///{tmp_path / f'{name}.db'}") for name in databases
    }
    registry = a_registry(tmp_path)
    config = Config(
        broker=BrokerSection(url=broker_process.url),
        registry=RegistrySection(url=f"sqlite:///{tmp_path / 'control.db'}", refresh_s=0.02),
        watchdog=WatchdogSection(poll_s=0.02),
    )
    service = Service(config, {})
    told, stopping, reloading = Told(), SignalFlag(), SignalFlag()
    logger = logging.getLogger("qmq_watchdog")
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    ended: list[bool] = []
    thread = threading.Thread(
        target=lambda: ended.append(service.run(stopping, reloading, lambda: config))
    )
    try:
        thread.start()
        told.wait_for("watchdog.started")
        put_rows(databases["a"], 1)
        registry.add(sections["a"])
        told.wait_for("database.added", "a")
        told.wait_for("sweep.done", "a")
        registry.set_enabled("a", is_enabled=False)
        told.wait_for("database.removed", "a")
        registry.add(section_of("b", url="sqlite:////nowhere/b.db"))
        told.wait_for("sweep.failed", "b")
        put_rows(databases["b"], 1)
        registry.add(sections["b"])
        told.wait_for("database.changed", "b")
        told.wait_for("sweep.done", "b")
        registry.add(section_of("c", url="sqlite:///c.db", password_env="NO_PASSWORD"))
        told.wait_for("database.refused", "c")
        registry.add(section_of("aa", url="mysql://db/shop?connect_timeout=soon"))
        told.wait_for("database.refused", "aa")
        registry.remove("b")
        told.wait_for("database.removed", "b")
    finally:
        stopping.set()
        thread.join(DEADLINE_S)
        logger.removeHandler(told)
        logger.setLevel(logging.NOTSET)
    assert ended == [True]
    assert [left(database) for database in databases.values()] == [set(), set()]
    for database in databases.values():
        database.close()


def test_a_registry_that_is_away_takes_no_database_away(
    tmp_path: Path, broker_process: BrokerProcess
) -> None:
    registry = a_registry(tmp_path)
    registry.add(section_of("a", url=f"sqlite:///{tmp_path / 'a.db'}"))
    config = Config(registry=RegistrySection(url=f"sqlite:///{tmp_path / 'control.db'}"))
    service = Service(config, {})
    job = service.daemon.jobs()["[registry]"]
    job.step(lambda: False)
    assert service.fleet.names == ["a"]
    (tmp_path / "control.db").rename(tmp_path / "moved.db")
    job.step(lambda: False)
    assert (job.is_well, job.delay_s > 0) == (False, True)
    assert service.fleet.names == ["a"]
    assert service.health.look()[1]["troubles"] == {"[registry]": "database_unavailable"}
    (is_open,) = [
        sample.value
        for metric in WatchdogCollector(service.daemon).collect()
        for sample in metric.samples
        if sample.name.endswith("breaker_open") and sample.labels["database"] == "[registry]"
    ]
    assert is_open == 1
    assert service.daemon.stop(DEADLINE_S)


def qmq(*arguments: str, environment: dict[str, str]) -> Result:
    return CliRunner().invoke(root, ["watchdog", *arguments], env=environment)


def test_the_commands_manage_the_registry_and_sweep_looks_into_it(
    tmp_path: Path, broker_process: BrokerProcess
) -> None:
    environment = {
        "QMQ_REGISTRY_URL": f"sqlite:///{tmp_path / 'control.db'}",
        "QMQ_BROKER_URL": broker_process.url,
    }
    shop = make_database(tmp_path / "shop.db")
    put_rows(shop, 2)

    def call(*arguments: str, exit_code: int = 0) -> str:
        result = qmq(*arguments, environment=environment)
        assert result.exit_code == exit_code, result.output
        return result.output

    (tmp_path / "control.db").touch()
    assert "databases init" in call("sweep", exit_code=2)
    assert call("databases", "init") == "created\n"
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    assert call("databases", "add", "shop", url, "--rows-per-s", "100", "--disabled") == "added\n"
    assert json.loads(call("sweep", "--json"))["databases"] == []
    assert call("databases", "enable", "shop") == "enabled\n"
    assert json.loads(call("sweep", "--json"))["sent"] == 2
    assert call("databases", "list") == f"shop  enabled  {url}\n"
    found = json.loads(call("databases", "list", "--json"))["databases"][0]
    assert (found["name"], found["rows_per_s"], found["is_enabled"]) == ("shop", 100, True)
    assert call("databases", "disable", "shop", "--json") == '{"name": "shop", "disabled": true}\n'
    assert call("databases", "remove", "shop") == "removed\n"
    assert "not in the registry" in call("databases", "remove", "shop", exit_code=1)
    refused = call("databases", "add", "x", "mysql://a:hunter2@b/c", exit_code=2)
    assert "has a password in it" in refused
    assert "hunter2" not in refused
    shop.close()


def test_without_a_registry_the_commands_say_where_to_configure_it() -> None:
    result = qmq("databases", "list", environment={})
    assert result.exit_code == 2
    assert "QMQ_REGISTRY_URL" in result.output
