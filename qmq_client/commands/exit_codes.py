"""Exit codes of `qmq`, the same for every sub-command.

====  ==========================================================================
0     done, or there was nothing to do
1     done, but something needs attention: rows failed or parked, a check found faults
2     wrong call or configuration, a token that the broker refuses, or a database not set up
3     the broker or a database could not be reached, or cannot do this now (busy, read-only, disk
      full); the same call may work later
====  ==========================================================================
"""

from __future__ import annotations

from typing import Final

from qmq_client.errors import (
    BrokerAccessError,
    BrokerOlderError,
    BrokerRefusedError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidMessageError,
    OutboxMissingError,
    QmqError,
    TransportError,
)

DONE: Final = 0
ATTENTION: Final = 1
WRONG_CALL: Final = 2
UNREACHABLE: Final = 3

#: The first matching class counts: a refusal is an answer, the other transport errors are not.
_BY_ERROR: Final[tuple[tuple[type[QmqError], int], ...]] = (
    (ConfigurationError, WRONG_CALL),
    (InvalidMessageError, WRONG_CALL),
    (OutboxMissingError, WRONG_CALL),
    (DatabaseUnavailableError, UNREACHABLE),
    (BrokerAccessError, WRONG_CALL),
    (BrokerRefusedError, ATTENTION),
    (BrokerOlderError, ATTENTION),
    (TransportError, UNREACHABLE),
)
#: Statuses of requests that every broker refuses: malformed, too large, or with an invalid value.
_MALFORMED: Final = frozenset({400, 413, 422})


def exit_code_of(error: QmqError) -> int:
    """The exit code for a command that ended with this error."""
    if isinstance(error, BrokerRefusedError) and error.status in _MALFORMED:
        return WRONG_CALL
    for kind, exit_code in _BY_ERROR:
        if isinstance(error, kind):
            return exit_code
    return ATTENTION
