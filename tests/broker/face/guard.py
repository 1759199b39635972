"""What a guarded broker needs: tokens by the command that makes them, certificates of a test authority."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import trustme
from click.testing import CliRunner

from qmq_broker.face.commands.token import token


def run_token(*words: str) -> str:
    """What the command prints; fails unless it ends well."""
    outcome = CliRunner().invoke(token, words)
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout


def add_token(tokens: Path, *roles: str, name: str = "shop") -> tuple[str, str]:
    """The id and the text of a new token."""
    given = [word for role in roles for word in ("--role", role)]
    made = json.loads(run_token("add", name, "--tokens", str(tokens), *given, "--json"))
    return made["id"], made["token"]


class Authority:
    """A certificate authority of this test, and the files it made."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._ca = trustme.CA()
        self._folder = folder
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(
        self,
        *names: str,
        as_file: str,
        common_name: str | None = None,
        not_before: datetime | None = None,
        not_after: datetime | None = None,
    ) -> tuple[str, str]:
        """Paths of a certificate for these names and of its key; valid within these times."""
        made = self._ca.issue_cert(
            *names, common_name=common_name, not_before=not_before, not_after=not_after
        )
        certificate, key = (self._folder / f"{as_file}.{kind}" for kind in ("pem", "key"))
        certificate.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return str(certificate), str(key)

    def server_options(self, *names: str, as_file: str = "server") -> list[str]:
        """Options of `qmq broker serve` for a certificate of these names."""
        certificate, key = self.issue(*(names or ("127.0.0.1",)), as_file=as_file)
        return ["--tls-cert", certificate, "--tls-key", key]
