"""Settings: which layer wins, what is refused, and that no secret is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qmq_client.database.engine import open_engine
from qmq_client.database.url import database_url
from qmq_client.errors import ConfigurationError
from qmq_client.settings.config import DATABASES_MAX, FILE_BYTES_MAX, LoadedConfig, load_config
from qmq_client.settings.masking import mask_secrets
from qmq_client.settings.sections import BrokerSection, Config, WatchdogSection
from qmq_client.transport.http import DEFAULT_BROKER_URL

FILE = """
[broker]
url = "http://file:1"
[watchdog]
batch_rows = 10
lease_ms = 200
[[database]]
name = "orders"
url = "sqlite:///orders.db"
[[database]]
name = "stock-eu"
url = "sqlite:///stock.db"
table_prefix = "outbox_"
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str | None = None, **arguments: Any) -> LoadedConfig:
    if text is not None:
        Path("qmq.toml").write_text(text, encoding="utf-8")
    return load_config(**{"environment": {}, **arguments})


def origins(loaded: LoadedConfig) -> dict[str, str]:
    return {setting.path: setting.origin for setting in loaded.settings}


def problem(text: str | None = None, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, **arguments)
    return str(caught.value)


def test_without_anything_the_built_in_values_hold() -> None:
    loaded = load()
    assert loaded.config == Config()
    assert set(origins(loaded).values()) == {"built-in"}


def test_the_built_in_broker_is_where_the_transport_looks_by_itself() -> None:
    assert BrokerSection().url == DEFAULT_BROKER_URL


def test_the_file_then_the_environment_then_the_command_line() -> None:
    environment = {"QMQ_WATCHDOG_LEASE_MS": "300", "QMQ_WATCHDOG_POLL_S": "0.5", "HOME": "/x"}
    loaded = load(FILE, environment=environment, flags={"watchdog.poll_s": 7.0})
    watchdog = loaded.config.watchdog
    assert (watchdog.batch_rows, watchdog.lease_ms, watchdog.poll_s) == (10, 300, 7.0)
    assert watchdog.max_attempts == WatchdogSection().max_attempts
    found = origins(loaded)
    assert found["watchdog.batch_rows"] == "qmq.toml"
    assert found["watchdog.lease_ms"] == "QMQ_WATCHDOG_LEASE_MS"
    assert found["watchdog.poll_s"] == "command line"
    assert found["watchdog.max_attempts"] == "built-in"


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    assert load(FILE, flags={"watchdog.batch_rows": None}).config.watchdog.batch_rows == 10


def test_databases_are_used_in_the_order_of_the_file() -> None:
    first, second = load(FILE).config.databases
    assert (first.name, first.table_prefix) == ("orders", "qmq_")
    assert (second.name, second.table_prefix) == ("stock-eu", "outbox_")


def test_the_environment_changes_the_url_of_a_database_or_adds_one() -> None:
    environment = {
        "QMQ_DATABASE_STOCK_EU_URL": "sqlite:///moved.db",
        "QMQ_DATABASE_BILLS_URL": "sqlite:///bills.db",
    }
    loaded = load(FILE, environment=environment)
    urls = {database.name: database.url for database in loaded.config.databases}
    assert urls == {
        "orders": "sqlite:///orders.db",
        "stock-eu": "sqlite:///moved.db",
        "bills": "sqlite:///bills.db",
    }
    assert origins(loaded)["database.stock-eu.url"] == "QMQ_DATABASE_STOCK_EU_URL"


def test_one_database_needs_no_name() -> None:
    (database,) = load(environment={"QMQ_DATABASE_URL": "sqlite:////var/shop.db"}).config.databases
    assert (database.name, database.url) == ("shop", "sqlite:////var/shop.db")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:////var/lib/shop.v2.db", "shop-v2"),
        ("mysql+pymysql://app:pw@db:3306/orders?charset=utf8mb4", "orders"),
        ("postgresql://app:pw@db", "db"),
        ("sqlite://", "database"),
    ],
)
def test_a_url_gives_a_name_without_secrets(url: str, name: str) -> None:
    assert load(databases=[url]).config.databases[0].name == name


def test_databases_of_the_command_line_are_the_only_ones() -> None:
    loaded = load(FILE, databases=["stock-eu", "sqlite:///new.db", "sqlite:///new.db"])
    assert [database.name for database in loaded.config.databases] == ["stock-eu", "new"]


def test_a_file_given_as_a_database_is_answered_with_its_url() -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(databases=["shop.db"])
    assert str(refused.value) == (
        "shop.db: not known (in --database). For a file: sqlite:///shop.db. "
        "For a server: its URL, or a name of [[database]]."
    )
    with pytest.raises(
        ConfigurationError, match=r"Known: orders, .* For a file: sqlite:///shop\.db\."
    ):
        load(FILE, databases=["shop.db"])


def test_two_urls_that_end_alike_get_names_of_their_own() -> None:
    loaded = load(FILE, databases=["sqlite:///a/orders.db", "sqlite:///b/orders.db"])
    assert [each.name for each in loaded.config.databases] == ["orders-2", "orders-3"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[watchdog]\nbatch_row = 1", "Did you mean 'watchdog.batch_rows'?"),
        ("[watchdgo]\nbatch_rows = 1", "Did you mean 'watchdog'?"),
        ("[colours]\nred = 1", "Known: broker, watchdog, registry, database."),
        ("broker = 1", "broker: not one table"),
        ('[[database]]\nname = "a"\nurl = "b"\nshema = "c"', "Did you mean 'database.a.schema'?"),
        ('[[database]]\nname = "orders"\nurl = "b"\nretention = 1', "Known: name, url, "),
        ('[[database]]\nurl = "b"', "database 1: has no name"),
        ('[database]\nname = "a"', "Write [[database]] in qmq.toml."),
        ('[[database]]\nname = "a"', "missing required field `url`"),
        (
            '[[database]]\nname = "a b"\nurl = "c"',
            "database.a b.name: 'a b' from qmq.toml. Use 1 to 63 characters of A-Z a-z 0-9 _ . -",
        ),
        ('[[database]]\nname = "a"\nurl = "b"\ntable_prefix = "x; DROP"', "table_prefix"),
        ("[watchdog]\nbatch_rows = 0", "watchdog.batch_rows: '0' from qmq.toml"),
        ("[watchdog]\nbatch_rows = 'many'", "watchdog.batch_rows: 'many' from qmq.toml"),
        ("[watchdog]\npoll_s = nan", "watchdog.poll_s"),
        ("[watchdog", "qmq.toml: not TOML"),
        ("[[watchdog]]\npoll_s = 1", "Write [watchdog] once in qmq.toml."),
        (f"x = {'[' * 2_000}{']' * 2_000}", "qmq.toml: not TOML: nested too deeply"),
        (f"x = {'9' * 5_000}", "qmq.toml: not TOML"),
        ("# " + "x" * FILE_BYTES_MAX, "too long for a configuration"),
        ("[watchdog]\nlease_ms = 99", "watchdog.lease_ms: '99' from qmq.toml"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, expected: str) -> None:
    assert expected in problem(text)


def test_rules_for_text_are_reported_in_words() -> None:
    one = '[[database]]\nname = "a"\nurl = "b"\n'
    for line, count in (('table_prefix = "é"', 32), ('schema = "a\\tb"', 63)):
        assert f"Use up to {count} printable characters of ASCII, and none" in problem(one + line)
    assert "Use HOST:PORT" in problem('[watchdog]\nmetrics_listen = "x"')
    assert "Use 1 to 63 characters of A-Z a-z 0-9 _." in problem('[registry]\ntable = "a;b"')


def test_of_a_long_value_the_beginning_is_reported() -> None:
    told = problem(f'[[database]]\nname = "a"\nurl = "b"\ntable_prefix = "{"x" * 100_000}"')
    assert f"'{'x' * 200}…' from qmq.toml. Use" in told
    assert len(told) < 400


def test_a_value_that_is_wrong_is_not_told_as_missing_too() -> None:
    told = problem('[[database]]\nname = "a b"\nurl = "c"\nrows_per_s = -1')
    assert told.startswith("2 settings: (1) database.a b.")
    assert "missing" not in told
    assert told.endswith("0. Fix them all."), "no sentence ends twice"


def test_a_name_given_twice_is_refused() -> None:
    one = '[[database]]\nname = "a"\nurl = "b"\n'
    assert "a name of its own" in problem(one + one)


def test_what_is_wrong_in_the_environment_is_named() -> None:
    assert problem(environment={"QMQ_WATCHDOG_BATCH_ROWS": "x"}) == (
        "watchdog.batch_rows: 'x' from QMQ_WATCHDOG_BATCH_ROWS. Expected `int`, got `str`."
    )
    assert "Did you mean 'QMQ_WATCHDOG_BATCH_ROWS'?" in problem(
        environment={"QMQ_WATCHDOG_BATCHROWS": "1"}
    )


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("QMQ_BROKER", "QMQ_BROKER_URL"),
        ("QMQ_DATABASE", "QMQ_DATABASE_URL"),
        ("QMQ_BROKER_ULR", "QMQ_BROKER_URL"),
        ("QMQ_DATABASE_ULR", "QMQ_DATABASE_URL"),
        ("QMQ_DATABASE_PG_URI", "QMQ_DATABASE_PG_URL"),
        ("QMQ_DATABASE_PG_RWS_PER_S", "QMQ_DATABASE_PG_ROWS_PER_S"),
        ("QMQ_DATABASE_ORDERS_ROWS_PERS", "QMQ_DATABASE_ORDERS_ROWS_PER_S"),
        ("QMQ_DATABASE_STOCK_EU_TABEL_PREFIX", "QMQ_DATABASE_STOCK_EU_TABLE_PREFIX"),
        ("QMQ_REGISTRY_PASSWORD_EVN", "QMQ_REGISTRY_PASSWORD_ENV"),
    ],
)
def test_a_slip_in_a_variable_is_refused_with_what_was_meant(variable: str, meant: str) -> None:
    assert problem(environment={variable: "1"}) == (
        f"{variable}: not known (in environment). Did you mean {meant!r}?"
    )


@pytest.mark.parametrize(
    "variable",
    [
        "QMQ_SOMETHING_ELSE",
        "QMQ_TEST_MYSQL_URL",
        "QMQ_DATABASE_PG_PASSWORD",
        "QMQ_REGISTRY_PASSWORD",
        "QMQ_BROKER_PORT",
        "QMQ_BROKER_SERVICE_HOST",
        "QMQ_BROKER_SERVICE_PORT_HTTP",
        "QMQ_DATABASE_SERVICE_HOST",
        "QMQ_DATABASE_PORT_5432_TCP_ADDR",
        "QMQ_WATCHDOG_PORT",
        "QMQ_BROKER_PORT_9470_TCP",
        "QMQ_DATABASE_USER",
        "QMQ_DATABASE_HOST",
    ],
)
def test_variables_of_others_that_begin_alike_are_left_alone(variable: str) -> None:
    assert load(environment={variable: "tcp://10.0.0.1:9470"}).config == Config()


def test_each_key_of_a_database_may_come_from_the_environment() -> None:
    loaded = load(
        FILE,
        environment={
            "QMQ_DATABASE_STOCK_EU_ROWS_PER_S": "7",
            "QMQ_DATABASE_BILLS_KEEP_SENT_S": "60",
            "QMQ_DATABASE_BILLS_URL": "sqlite:///bills.db",
        },
    )
    orders, stock, bills = loaded.config.databases
    assert (orders.rows_per_s, stock.rows_per_s, stock.table_prefix) == (0, 7, "outbox_")
    assert (bills.name, bills.keep_sent_s) == ("bills", 60)
    assert origins(loaded)["database.stock-eu.rows_per_s"] == "QMQ_DATABASE_STOCK_EU_ROWS_PER_S"


def test_the_only_database_needs_no_name_in_its_keys_either() -> None:
    only = load(environment={"QMQ_DATABASE_URL": "sqlite:///a.db", "QMQ_DATABASE_SCHEMA": "mine"})
    assert [(each.name, each.schema) for each in only.config.databases] == [("a", "mine")]


@pytest.mark.parametrize("variable", ["QMQ_DATABASE_SCHEMA", "QMQ_DATABASE_BILLS_SCHEMA"])
def test_a_key_of_a_database_that_is_not_configured_is_refused(variable: str) -> None:
    text = problem(FILE, environment={variable: "mine"})
    assert text.startswith(f"{variable}: of no configured database.")
    assert text.endswith("QMQ_DATABASE_<NAME>_SCHEMA with one of these: orders, stock-eu.")


def test_a_broker_that_is_no_address_is_refused() -> None:
    assert problem(environment={"QMQ_BROKER_URL": "zzz"}) == (
        "broker.url: 'zzz' from QMQ_BROKER_URL. Use a URL like http://127.0.0.1:9470."
    )


def test_of_several_wrong_values_all_are_named() -> None:
    text = problem(
        "[watchdog]\nlease_ms = 0\npoll_s = -1",
        environment={"QMQ_BROKER_URL": "zzz", "QMQ_WATCHDOG_BATCH_ROWS": "x"},
    )
    assert text.startswith("4 settings: ")
    for name in ("broker.url", "watchdog.lease_ms", "watchdog.poll_s", "watchdog.batch_rows"):
        assert f"{name}: " in text


def test_unknown_keys_and_wrong_values_of_all_layers_are_named_at_once() -> None:
    text = problem(
        "[watchdog]\nbatch_row = 1\nlease_ms = 0\n[colours]\nred = 1\n"
        '[[database]]\nname = "a"\nurl = "b"\nshema = "c"\n[[database]]\nurl = "x"',
        environment={"QMQ_WATCHDOG_BATCHROWS": "1"},
    )
    assert text.startswith("6 settings: ")
    for name in (
        "watchdog.batch_row: not known",
        "colours: not known",
        "database.a.shema: not known",
        "database 2: has no name",
        "QMQ_WATCHDOG_BATCHROWS: not known",
        "watchdog.lease_ms: '0'",
    ):
        assert name in text, name


def test_the_registry_may_come_from_the_environment() -> None:
    registry = load(environment={"QMQ_REGISTRY_URL": "sqlite:///control.db"}).config.registry
    assert (registry.url, registry.table) == ("sqlite:///control.db", "qmq_database")


def test_hundreds_of_databases_may_be_configured() -> None:
    tables = [f'[[database]]\nname = "d{i}"\nurl = "sqlite:///{i}.db"' for i in range(1_000)]
    assert len(load("\n".join(tables)).config.databases) == 1_000


def test_names_of_others_in_the_environment_are_left_alone() -> None:
    assert load(environment={"QMQ_SOMETHING_ELSE": "1"}).config == Config()


def test_a_file_that_was_asked_for_must_be_there() -> None:
    assert "nowhere.toml: No such file" in problem(file=Path("nowhere.toml"))


def test_a_name_that_is_no_database_is_answered_with_the_nearest() -> None:
    assert "Did you mean 'orders'?" in problem(FILE, databases=["order"])


def test_too_many_databases_are_refused() -> None:
    urls = [f"sqlite:///{number}.db" for number in range(DATABASES_MAX + 1)]
    assert f"allowed: {DATABASES_MAX}" in problem(databases=urls)


def test_a_password_from_the_environment_never_shows() -> None:
    text = '[[database]]\nname = "a"\nurl = "postgresql://app@db/shop"\npassword_env = "SECRET"'
    loaded = load(text)
    (section,) = loaded.config.databases
    assert database_url(section, {"SECRET": "p@ss/word"}).password == "p@ss/word"
    assert "p@ss" not in repr(loaded)
    with pytest.raises(ConfigurationError, match="SECRET is not in the environment"):
        database_url(section, {})


def test_a_password_may_be_the_first_line_of_a_file() -> None:
    text = '[[database]]\nname = "a"\nurl = "postgresql://app@db/shop"\npassword_file = "secret"'
    (section,) = load(text).config.databases
    with pytest.raises(ConfigurationError, match=r"password_file: secret: No such file"):
        database_url(section, {})
    Path("secret").write_bytes(b"p@ss/word\nanother line")
    assert database_url(section, {}).password == "p@ss/word"
    Path("secret").write_bytes(b"\xffhunter2\n")
    (no_path,) = load(text.replace("secret", "\\u0000")).config.databases
    for unreadable in (section, no_path):
        with pytest.raises(ConfigurationError, match="not UTF-8 text"):
            database_url(unreadable, {})


def test_settings_show_urls_without_passwords() -> None:
    loaded = load(environment={"QMQ_DATABASE_URL": "mysql://app:hunter2@db/shop"})
    shown = {setting.path: setting.value for setting in loaded.settings}
    assert shown["database.shop.url"] == "mysql://app:***@db/shop"
    assert loaded.config.databases[0].url == "mysql://app:hunter2@db/shop"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mysql://u:p@h/d", "mysql://u:***@h/d"),
        ("http://u:p:q@h:1/x", "http://u:***@h:1/x"),
        ("postgresql://u:p@ss@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u:p/s@h/d", "postgresql://u:***@h/d"),
        ("postgresql://h/d?user=u&password=p&x=1", "postgresql://h/d?user=u&password=***&x=1"),
        ("x://h/d?sslPassword=p", "x://h/d?sslPassword=***"),
        ("no address: a:b@c", "no address: a:b@c"),
        ("sqlite:////var/lib/shop.db", "sqlite:////var/lib/shop.db"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked


@given(st.text(st.characters(blacklist_categories=["Z", "C"]), min_size=3))
def test_no_part_of_a_password_survives_the_mask(password: str) -> None:
    shown = mask_secrets(f"mysql://app:{password}@database/shop")
    assert shown == "mysql://app:***@database/shop"


def test_an_unescaped_password_does_not_become_a_host_that_errors_tell() -> None:
    (section,) = load(databases=["mysql://app:hun@ter2@127.0.0.1:1/shop"]).config.databases
    with pytest.raises(ConfigurationError, match="%40") as caught:
        open_engine(section, {})
    assert "ter2" not in str(caught.value)


def test_a_url_that_is_none_is_refused_without_its_password() -> None:
    (section,) = load(databases=["://app:hunter2@x"]).config.databases
    with pytest.raises(ConfigurationError) as caught:
        open_engine(section, {})
    assert "hunter2" not in str(caught.value)
