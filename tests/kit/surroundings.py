"""What a shell or a CI machine says to every program, kept from the tests and from what they start.

A proxy would stand before the brokers of the tests, `QMQ_BROKER_URL` would name another one, `PGOPTIONS`
would reach the server, and a narrow terminal would break the lines of a table. The package managers go
on by the proxies: see `for_packages`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

_PROXIES: Final = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
#: Of our programs, of the libraries under the drivers, and of those that draw for a terminal.
_STARTS: Final = ("QMQ_", "PG", "MYSQL_", "MARIADB_")
_DRAWING: Final = ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
#: What people say to the tests themselves.
_OURS: Final = ("QMQ_TEST_", "QMQ_CRASH_", "QMQ_FUZZ_")
#: Where a proxy is kept: workers start with what is left here.
_KEPT: Final = "QMQ_TEST_KEPT_"


#: Where pytest makes its folders: memory, where there is plenty. What a sync is worth is proven elsewhere.
_ROOT: Final = "PYTEST_DEBUG_TEMPROOT"
_MEMORY: Final = Path("/dev/shm")
_MEMORY_BYTES_MIN: Final = 8 * 2**30


def keep_files_in_memory(environment: MutableMapping[str, str]) -> None:
    """Spare the tests half of their time, which is syncs, unless somebody has said where their files go."""
    if not os.access(_MEMORY, os.W_OK):
        return
    room = os.statvfs(_MEMORY)
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(facts["MemAvailable"].split()[0]) * 1024
    if min(room.f_bavail * room.f_frsize, free_bytes) >= _MEMORY_BYTES_MIN:
        environment.setdefault(_ROOT, str(_MEMORY))


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
