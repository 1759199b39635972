"""A broker with tokens, and callers with each role, without sockets."""

from __future__ import annotations

from pathlib import Path

from qmq_broker.face.authentication.access import parse_right
from qmq_broker.face.authentication.authenticator import Authenticator
from qmq_broker.face.authentication.token_file import WatchedTokens, change_tokens
from qmq_broker.face.authentication.tokens import TokenEntry, TokenList, digest_of, new_token
from tests.broker.face.asgi import Client, Reply
from tests.broker.service.rig import Rig

#: Callers, with the roles of each.
CALLERS = {
    "producer": ["producer:orders.*"],
    "consumer": ["consumer:orders.*"],
    "admin": ["admin:orders.*"],
    "operator": ["admin"],
    "reader of all": ["consumer"],
}


class Guarded:
    """A broker with tokens, and somebody with each of them."""

    def __init__(self, rig: Rig, path: Path) -> None:
        made = {name: new_token() for name in CALLERS}
        entries = tuple(
            TokenEntry(
                id=made[name][0],
                name=name.replace(" ", "-"),
                rights=tuple(parse_right(text) for text in roles),
                digest=digest_of(made[name][1]).hex(),
            )
            for name, roles in CALLERS.items()
        )
        change_tokens(str(path), lambda _: TokenList(tokens=entries))
        self.tokens = {name: text for name, (_, text) in made.items()}
        self.authenticator = Authenticator(WatchedTokens(str(path)), rig.broker.time.now_ms)
        self.client = Client(rig, authenticator=self.authenticator)

    def ask(self, caller: str | None, method: str, path: str, body: object = None) -> Reply:
        headers = []
        if caller is not None:
            headers.append((b"authorization", b"Bearer " + self.tokens[caller].encode()))
        if method == "GET":
            return self.client.get(path, headers=headers)
        return self.client.post(path, body, headers=headers)
