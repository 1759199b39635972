"""How our own processes connect by PyMySQL; applications bring their own engines.

PyMySQL tries TLS unless the URL says otherwise, and reads the certificates of all authorities for
each connection, though it verifies none: ten times the processor time of everything else, TLS
included (26 ms against 2, and 0.5 without TLS). A watchdog with more databases than connections to
keep connects for each sweep. So one context serves all connections that name no certificates.
"""

from __future__ import annotations

import ssl
from functools import cache
from types import ModuleType
from typing import Any, Final

#: The driver that this is for, in SQLAlchemy's spelling.
DRIVER: Final = "pymysql"
#: CR_SSL_CONNECTION_ERROR: the server has no TLS.
_NO_TLS: Final = 2026
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
        is_preferred = not any(name.startswith("ssl") for name in options)
        try:
            if is_preferred:
                try:
                    return pymysql.connect(*arguments, ssl=_context(), **options)
                except pymysql.OperationalError as error:
                    if error.args[0] != _NO_TLS:
                        raise
                    options["ssl_disabled"] = True
            return pymysql.connect(*arguments, **options)
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
def _context() -> ssl.SSLContext:
    """Verifies nothing, as PyMySQL does when no certificate is named."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
