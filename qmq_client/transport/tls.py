"""The TLS context of a transport's connections, which is created again when its files change.

New connections use a renewed certificate. If the files cannot be read, the previous context stays
in use, and a line is logged.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Final

from qmq_client.certificate import validity_of
from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.errors import ConfigurationError
from qmq_client.transport.address import BrokerAddress

_log: Final = logging.getLogger("qmq.transport")
#: Inode, length, and times of the last change of content and of metadata.
_Stamp = tuple[int, int, int, int]


class ClientTls:
    """TLS settings for one broker. Safe for any thread."""

    def __init__(self, address: BrokerAddress) -> None:
        """Raises `ConfigurationError` for files that cannot be used."""
        self._address = address
        #: Replaced together: of two threads that read the files, the one with the older version may be last.
        self._loaded = self._look(), address.ssl_context()
        self._log_time()

    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        stamps, (known, context) = self._look(), self._loaded
        if stamps == known:
            return context
        try:
            context = self._address.ssl_context()
        except ConfigurationError as error:
            _log.error("new certificate is not usable, the previous one stays in use: %s", error)
        else:
            self._log_time()
        self._loaded = stamps, context
        return context

    def _look(self) -> tuple[_Stamp | None, ...]:
        address = self._address
        files = (address.ca_file, address.cert_file, address.key_file)
        return tuple(_stamp(file) for file in files if file)

    def _log_time(self) -> None:
        if fault := certificate_fault(self._address.cert_file):
            _log.error("broker.cert_file %s: certificate %s", self._address.cert_file, fault)


def certificate_fault(cert_file: str) -> str:
    """Why this certificate is not valid now; empty if it is valid, or cannot be read."""
    try:
        validity = validity_of(Path(cert_file).read_text("ascii", "replace"))
    except (OSError, ValueError):
        return ""
    return validity.fault(SYSTEM_CLOCK.now_ms())


def _stamp(path: str) -> _Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None  # loading it says why
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
