"""TLS of the listening socket: a context, which is made anew when its files change.

TLS 1.2 or later. With a client CA, every client must show a certificate signed by it (mutual TLS).
What was renewed counts for new connections; files that cannot be read leave the context before in
place, with a line in the log.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from typing import Final

from qmq_broker.face.callers.outside_files import Stamp, read_bounded, stamp_of
from qmq_broker.face.logs import log_event
from qmq_broker.options import TlsOptions
from qmq_client.wire.errors import QmqError

_LOG: Final = logging.getLogger(__name__)
#: Of OpenSSL's verification: not valid yet, and expired.
_WRONG_TIME: Final = (9, 10)
#: Turns of each side until a handshake in memory has ended: a full one takes two.
_TURNS_MAX: Final = 8
#: A chain of certificates; the CAs of a whole company are more.
_FILE_BYTES_MAX: Final = 16 * 1024 * 1024


class TlsError(QmqError):
    """A certificate or key cannot be used."""

    code = "tls"

    def __init__(self, *, files: str, reason: str) -> None:
        super().__init__(
            f"{files}: {reason}. Give a certificate chain and its unencrypted key, both as PEM."
        )
        self.files = files
        self.reason = reason


class TlsContext:
    """What the listener hands to each new connection. Belongs to the loop thread."""

    def __init__(self, options: TlsOptions) -> None:
        """Raises `TlsError`."""
        self._options = options
        self._stamps = self._look()
        #: For the next connection. Never changed, only replaced: OpenSSL adds authorities to those that
        #: a context has, and sessions begun under those before could be resumed.
        self.context = _new_context(options)

    def forget(self) -> None:
        """Let the next step read the files, changed or not."""
        self._stamps = ()

    def step(self) -> bool:
        """Check the files once; returns whether there is a new context."""
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.context = _new_context(self._options)
        except TlsError as error:
            log_event(_LOG, logging.ERROR, "certificate_not_read", reason=error)
            return False
        log_event(_LOG, logging.INFO, "certificate_read", file=self._options.certificate_file)
        return True

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
    if reason := _wrong_time(context, options.certificate_file):
        file = options.certificate_file
        log_event(_LOG, logging.ERROR, "certificate_out_of_date", file=file, reason=reason)
    return context


def _wrong_time(context: ssl.SSLContext, certificate_file: str) -> str:
    """Why every client will refuse the certificate at this time; empty if it will not.

    Asks a client in memory that trusts this very certificate: the library shows none of its own.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        client.load_verify_locations(certificate_file)
        asking = client.wrap_bio(to_client, to_server)
        shown = context.wrap_bio(to_server, to_client, server_side=True)
        for side in (asking, shown) * _TURNS_MAX:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message if error.verify_code in _WRONG_TIME else ""
    except OSError:  # of a client without a certificate of its own, or a file that is gone again
        return ""
    return ""


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
    """Instead of asking for a password at a terminal where nobody sits."""
    raise ValueError("the key is encrypted")


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None  # loading it says why
