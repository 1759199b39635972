"""The tests hear nothing of the shell that started them but what is said to them."""

from __future__ import annotations

import os

from tests.kit.surroundings import for_packages, quieten

SAID = {
    "HTTPS_PROXY": "http://proxy.invalid",
    "no_proxy": "example.invalid",
    "QMQ_BROKER_URL": "http://broker.invalid",
    "QMQ_TEST_RUNGS": "private",
    "PGSSLMODE": "require",
    "MYSQL_PWD": "secret",
    "COLUMNS": "37",
    "PATH": "/bin",
}


def test_what_a_shell_says_to_our_programs_and_drivers_is_taken_away() -> None:
    environment = dict(SAID)
    quieten(environment)
    kept = {name for name in environment if name in SAID}
    assert kept == {"QMQ_TEST_RUNGS", "PATH"}


def test_package_managers_continue_by_the_proxy_also_in_a_worker() -> None:
    environment = dict(SAID)
    quieten(environment)
    quieten(environment)
    proxies = {"HTTPS_PROXY": "http://proxy.invalid", "no_proxy": "example.invalid"}
    assert for_packages(environment).items() >= proxies.items()


def test_this_very_run_was_started_so() -> None:
    heard = dict(os.environ)
    quieten(heard)
    assert dict(os.environ) == heard
