"""The TLS context of the listening socket, which is replaced when its files change.

TLS 1.2 or later. With a client CA, every client must show a certificate signed by it (mutual TLS).
New connections use renewed files; if the files cannot be read, the previous context stays in use and a line is logged.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from qmq_broker.face.authentication.outside_files import Stamp, read_bounded, stamp_of
from qmq_broker.face.logs import log_event
from qmq_broker.options import TlsOptions
from qmq_client.certificate import Validity, validity_of
from qmq_client.wire.errors import QmqError

_LOG: Final = logging.getLogger(__name__)
#: Enough for a chain of certificates, and for the CAs of a whole company.
_FILE_BYTES_MAX: Final = 16 * 1024 * 1024


@dataclass(kw_only=True, eq=False, repr=False)
class TlsError(QmqError):
    """A certificate or key cannot be used."""

    files: str
    reason: str

    code = "tls"
    text = "{files}: {reason}. Give a certificate chain and its unencrypted key, both as PEM."


class TlsContext:
    """The TLS context of new connections, read again when its files change. Belongs to the loop thread."""

    def __init__(self, options: TlsOptions, now_ms: Callable[[], int]) -> None:
        """Raises `TlsError`."""
        self._options = options
        self._now_ms = now_ms
        self._stamps = self._look()
        #: The context for the next connection. It is replaced, never changed: OpenSSL would add new
        #: authorities to the old ones, and sessions accepted under the old ones could be resumed.
        self.context = _new_context(options)
        self._validity = _validity(options.certificate_file)
        #: The last logged text about the certificate's validity.
        self._logged = ""
        self._log_time()

    def forget(self) -> None:
        """Make the next step read the files, even if unchanged."""
        self._stamps = ()

    def step(self) -> bool:
        """Check the files once; returns whether there is a new context."""
        stamps = self._look()
        if stamps == self._stamps:
            self._log_time()
            return False
        self._stamps = stamps
        try:
            self.context = _new_context(self._options)
        except TlsError as error:
            log_event(_LOG, logging.ERROR, "certificate_not_read", reason=error)
            return False
        log_event(_LOG, logging.INFO, "certificate_read", file=self._options.certificate_file)
        self._validity, self._logged = _validity(self._options.certificate_file), ""
        self._log_time()
        return True

    def _log_time(self) -> None:
        """Log once that every client will refuse the certificate, or soon will."""
        validity, now_ms = self._validity, self._now_ms()
        if validity is None:
            return
        event, level, reason = "", logging.ERROR, ""
        if fault := validity.fault(now_ms):
            event, reason = "certificate_out_of_date", f"certificate {fault}"
        elif (days := validity.days_left(now_ms)) is not None:
            event, level = "certificate_ends_soon", logging.WARNING
            reason = f"certificate expires in {days} days"
        if event != self._logged and event:
            log_event(_LOG, level, event, file=self._options.certificate_file, reason=reason)
        self._logged = event

    def _look(self) -> tuple[Stamp | None, ...]:
        options = self._options
        files = (options.certificate_file, options.key_file, options.client_ca_file)
        return tuple(_stamp(file) for file in files if file)


def _new_context(options: TlsOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    if options.client_ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, options)
    return context


def _validity(certificate_file: str) -> Validity | None:
    """When the certificate is valid; None if the file was removed meanwhile or has an unknown format of times."""
    try:
        return validity_of(
            read_bounded(certificate_file, _FILE_BYTES_MAX).decode("ascii", "replace")
        )
    except (OSError, ValueError):
        return None


def _load(context: ssl.SSLContext, options: TlsOptions) -> None:
    files = ", ".join(
        file
        for file in (options.certificate_file, options.key_file, options.client_ca_file)
        if file
    )
    try:
        if options.client_ca_file:
            authorities = read_bounded(options.client_ca_file, _FILE_BYTES_MAX)
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        context.load_cert_chain(options.certificate_file, options.key_file, password=_no_password)
    except ssl.SSLError as error:
        raise TlsError(files=files, reason=error.reason or str(error)) from error
    except OSError as error:
        raise TlsError(
            files=error.filename or files, reason=error.strerror or str(error)
        ) from error
    except ValueError as error:
        raise TlsError(files=files, reason=str(error)) from error


def _no_password() -> bytes:
    """Refuse the key, instead of asking for a password at a terminal."""
    raise ValueError("the key is encrypted")


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None  # loading the file raises the error with the reason
