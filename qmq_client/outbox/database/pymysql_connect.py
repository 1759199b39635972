"""How our own processes connect by PyMySQL; applications bring their own engines.

PyMySQL tries TLS unless the URL says otherwise, and reads the certificates of all authorities for
each connection, though it verifies none: ten times the processor time of everything else, TLS
included (26 ms against 2, and 0.5 without TLS). A watchdog with more databases than connections to
keep connects for each sweep. So one context, made by PyMySQL itself, serves all connections.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, Final

#: The driver that this is for, in SQLAlchemy's spelling.
DRIVER: Final = "pymysql"
_LACKING: Final = "cryptography"
_REMEDY: Final = (
    "the server asks for the password by caching_sha2_password, and without TLS PyMySQL needs a library "
    "to encrypt it: `pip install cryptography`, or connect by TLS (?ssl_ca=FILE in the URL)"
)
#: PyMySQL fails in its own code on an option or a character set that it does not know.
_OPTIONS: Final = "PyMySQL cannot connect as the URL says behind its `?`"


def driver() -> ModuleType:
    """PyMySQL with another `connect`, for `create_engine(module=…)`; raises `ImportError` without it.

    Not a listener of `do_connect`: one that returns a connection keeps all later listeners from
    being called.
    """
    import pymysql  # late: other databases do without it

    def connect(*arguments: Any, **options: Any) -> Any:
        try:
            return _connection_class()(*arguments, **options)
        except RuntimeError as error:
            if _LACKING not in str(error):
                raise
            raise pymysql.OperationalError(_REMEDY) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise pymysql.OperationalError(f"{_OPTIONS}: {error}") from error

    made = ModuleType(pymysql.__name__)
    vars(made).update(vars(pymysql), connect=connect)
    return made


@cache
def _connection_class() -> type[Any]:
    """PyMySQL's class, with one TLS context for all connections that name no certificates."""
    from pymysql.connections import Connection

    make: Callable[[Any, Any], ssl.SSLContext] = Connection._create_ssl_ctx
    kept: list[ssl.SSLContext] = []

    def context(connection: Any, given: Any) -> ssl.SSLContext:
        if given:
            return make(connection, given)
        if not kept:
            kept.append(make(connection, given))
        return kept[0]

    return type("Connection", (Connection,), {"_create_ssl_ctx": context})
