"""What a shell or a CI machine says to every program, kept from the tests and from what they start.

A proxy would stand before the brokers of the tests, `QMQ_BROKER_URL` would name another one, `PGOPTIONS`
would reach the server, and a narrow terminal would break the lines of a table. The package managers go
on by the proxies: see `for_packages`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

_PROXIES: Final = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
#: Of our programs, of the libraries under the drivers, and of those that draw for a terminal.
_STARTS: Final = ("QMQ_", "PG", "MYSQL_", "MARIADB_")
_DRAWING: Final = ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
#: What people say to the tests themselves.
_OURS: Final = ("QMQ_TEST_", "QMQ_CRASH_", "QMQ_FUZZ_")
#: Where a proxy is kept: workers start with what is left here.
_KEPT: Final = "QMQ_TEST_KEPT_"


def quieten(environment: MutableMapping[str, str]) -> None:
    """Take away what no test means. May be done again."""
    for name in list(environment):
        if name.lower() in _PROXIES:
            environment[_KEPT + name] = environment.pop(name)
        elif name in _DRAWING or (name.startswith(_STARTS) and not name.startswith(_OURS)):
            del environment[name]


def for_packages(environment: Mapping[str, str]) -> dict[str, str]:
    """For a package manager: with the proxies again, and with no question asked."""
    made = {name.removeprefix(_KEPT): value for name, value in environment.items()}
    return {**made, "DEBIAN_FRONTEND": "noninteractive"}
