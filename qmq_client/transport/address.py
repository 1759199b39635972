"""The address of the broker and its credentials: token, authorities, client certificate.

All code that connects to a broker accepts an address in place of a URL. For a URL alone, the
credentials come from the process's environment, under the names that every `qmq` command uses::

    QMQ_BROKER_TOKEN, QMQ_BROKER_TOKEN_FILE     QMQ_BROKER_CA_FILE
    QMQ_BROKER_CERT_FILE, QMQ_BROKER_KEY_FILE

The token is never shown, neither by `repr` nor in an error.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from qmq_client.errors import ConfigurationError
from qmq_client.settings.sections import BrokerSection
from qmq_client.wire.loopback import is_loopback
from qmq_client.wire.shown import shorten

_VARIABLES: Final = {
    name: f"QMQ_BROKER_{name.upper()}"
    for name in ("token", "token_file", "ca_file", "cert_file", "key_file")
}
_TOKEN: Final = re.compile(r"[!-~]{8,150}\Z")
_TOKEN_FILE_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """A broker's URL and the credentials for it. Files are read only when they are used."""

    url: str
    #: The token that `qmq broker token add` printed.
    token: str = field(default="", repr=False)
    #: A file that holds only the token; read again when the broker refuses the token.
    token_file: str = ""
    #: PEM file of the authorities that may have signed the broker's certificate; empty for the
    #: machine's own.
    ca_file: str = ""
    #: PEM file of a client certificate, for a broker that requires one.
    cert_file: str = ""
    #: PEM file of its key, if the key is not in `cert_file`.
    key_file: str = ""

    def __post_init__(self) -> None:
        if self.token and self.token_file:
            raise ConfigurationError(
                setting="broker.token",
                value="given together with broker.token_file",
                remedy="Give one of them.",
            )
        if self.key_file and not self.cert_file:
            raise ConfigurationError(
                setting="broker.key_file",
                value=f"{shorten(self.key_file)} without broker.cert_file",
                remedy="Give the certificate too.",
            )
        if self.token:
            _check_token("broker.token", self.token)

    @classmethod
    def of(
        cls, broker: str | BrokerAddress, environment: Mapping[str, str] | None = None
    ) -> BrokerAddress:
        """The address for a URL, completed from the environment; an address is returned as it is."""
        if isinstance(broker, BrokerAddress):
            return broker
        known = os.environ if environment is None else environment
        return cls(url=broker, **{name: known.get(key, "") for name, key in _VARIABLES.items()})

    @classmethod
    def of_section(cls, section: BrokerSection) -> Self:
        """The address in a configuration."""
        return cls(
            url=section.url,
            token=section.token,
            token_file=section.token_file,
            ca_file=section.ca_file,
            cert_file=section.cert_file,
            key_file=section.key_file,
        )

    @property
    def has_token(self) -> bool:
        """Whether a token is sent."""
        return bool(self.token or self.token_file)

    @property
    def is_in_clear(self) -> bool:
        """Whether others can read the traffic: plain HTTP that leaves this machine."""
        parts = urlsplit(self.url)
        return parts.scheme != "https" and not is_loopback(parts.hostname or "")

    def current_token(self) -> str:
        """The token to send now, empty for none; raises `ConfigurationError` for a bad file."""
        if not self.token_file:
            return self.token
        try:
            with Path(self.token_file).open("rb") as file:
                text = file.read(_TOKEN_FILE_BYTES_MAX).decode("ascii").strip()
        except OSError as error:
            raise ConfigurationError(
                setting="broker.token_file",
                value=f"{self.token_file}: {error.strerror or error}",
                remedy="Give a file that holds the token.",
            ) from error
        except ValueError as error:  # for invalid content, or an invalid path
            raise _no_token(f"broker.token_file {self.token_file}") from error
        return _check_token(f"broker.token_file {self.token_file}", text)

    def headers(self) -> dict[str, str]:
        """The headers with the credentials."""
        token = self.current_token()
        return {"authorization": f"Bearer {token}"} if token else {}

    def ssl_context(self) -> ssl.SSLContext:
        """The TLS context for the broker: 1.2 or later, with a check of its host name."""
        import httpx  # imported late, because it loads its own list of authorities

        if urlsplit(self.url).scheme != "https":
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not used, and trusts no certificate
        try:
            if self.ca_file:
                context = ssl.create_default_context(cafile=self.ca_file)
            else:
                context = httpx.create_ssl_context(trust_env=False)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert_file:
                context.load_cert_chain(
                    self.cert_file, self.key_file or None, password=_no_password
                )
        except (OSError, ValueError) as error:  # TLS errors are subclasses of it
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise ConfigurationError(
                setting="broker.ca_file, broker.cert_file, broker.key_file",
                value=f"{files}: {getattr(error, 'reason', None) or error}",
                remedy="Give files in PEM, the key unencrypted.",
            ) from error
        return context


def _no_password() -> bytes:
    """Called instead of a password prompt on a terminal."""
    raise ValueError("the key is encrypted")


def _check_token(setting: str, text: str) -> str:
    if not _TOKEN.match(text):
        raise _no_token(setting)
    return text


def _no_token(setting: str) -> ConfigurationError:
    return ConfigurationError(
        setting=setting,
        value="not a token (value not shown)",
        remedy="Give only the token that `qmq broker token add` printed.",
    )
