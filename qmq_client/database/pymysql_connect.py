"""How our own processes connect by PyMySQL; applications bring their own engines.

What PyMySQL raises in its own code, for a missing library or an option that it does not know, becomes
an error of the database with a remedy.
"""

from __future__ import annotations

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
