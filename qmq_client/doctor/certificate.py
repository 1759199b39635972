"""The doctor's check whether the broker's certificate has expired or expires soon.

It connects to the broker's port. As for clients, `transport/address.py` decides which certificates are trusted.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final
from urllib.parse import urlsplit

from qmq_client.clock import SYSTEM_CLOCK
from qmq_client.doctor.finding import Findings, found
from qmq_client.errors import ConfigurationError
from qmq_client.settings.masking import mask_secrets
from qmq_client.transport.address import BrokerAddress

_ANSWER_S_MAX: Final = 5.0
#: The broker's log warns as early: time to notice it, even after a holiday.
_SOON_DAYS: Final = 14
_DAY_S: Final = 86_400
#: OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED.
_EXPIRED: Final = 10
_FIX: Final = "renew it, replace the files, and send the broker SIGHUP"


def certificate(address: BrokerAddress) -> Findings:
    """A finding if the certificate has expired or soon will; none if the broker does not answer."""
    try:
        days = _days_left(address)
    except (OSError, ValueError, ConfigurationError):  # the next check gives the reason
        return
    if days is None or days >= _SOON_DAYS:
        return
    when = "has expired" if days < 0 else f"expires in {days} days"
    yield found("broker.certificate", f"{mask_secrets(address.url)}: certificate {when}", _FIX)


def _days_left(address: BrokerAddress) -> int | None:
    parts = urlsplit(address.url)
    if parts.scheme != "https" or not parts.hostname:
        return None
    place = (parts.hostname, parts.port or 443)
    try:
        with (
            socket.create_connection(place, _ANSWER_S_MAX) as plain,
            address.ssl_context().wrap_socket(plain, server_hostname=parts.hostname) as connection,
        ):
            shown = connection.getpeercert()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return -1
        raise
    if not shown:
        return None
    end_s = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    return int((end_s - SYSTEM_CLOCK.now_ms() / 1000) // _DAY_S)
