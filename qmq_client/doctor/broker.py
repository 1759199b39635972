"""The doctor's findings about a broker, from its reports over HTTP. They do not say whether two processes
use its data directory: the second one refuses to start by itself (promise B9).
"""

from __future__ import annotations

import json
from typing import Any, Final

from qmq_client.doctor.certificate import certificate
from qmq_client.doctor.finding import Findings, found
from qmq_client.errors import NotTheBrokerError, TransportError
from qmq_client.settings.masking import mask_secrets
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.json_questions import ask, url_of

_ANSWER_S_MAX: Final = 5.0
_ANSWER_BYTES_MAX: Final = 64 * 1024
#: The answer has a line for each subject.
_STATUS_BYTES_MAX: Final = 16 * 1024 * 1024
#: Each answer of a broker with another status than 200 has one of these fields.
_SAYS_WHY: Final = ("status", "code")
_DURABLE: Final = "durable"
#: From this share of a limit on, an operator should act before the broker refuses requests.
_USED_SHARE: Final = 0.8
#: States that an operator asked for; a broker without disk space still says "serving".
_READ_ONLY: Final = "read-only"


def broker(given: str | BrokerAddress) -> Findings:
    """Check whether the broker is ready, and whether it accepts this caller."""
    address = BrokerAddress.of(given)
    url = address.url
    yield from certificate(address)
    answer = _ask(address, "/readyz")
    if isinstance(answer, str):
        read = answer
        yield found(
            "broker.unreachable", read, "start it with `qmq broker serve`, or give its address"
        )
        return
    status, body = answer
    if status != 200:
        read = f"{url}: {body.get('status', status)}: {body.get('reason') or 'no reason given'}"
        yield found("broker.not_ready", read, "read the broker's log, fix the cause, restart it")
    elif body.get("status") == _READ_ONLY:
        reason = body.get("reason") or "no reason given"
        read = f"{url}: {_READ_ONLY}: {reason}"
        fix = f"qmq broker readonly off --broker {mask_secrets(url)}"
        yield found("broker.read_only", read, fix)
    elif body.get("takes_messages") is False:
        read = f"{url}: {body.get('status')}, and accepts no messages"
        fix = "free disk space on the broker's machine, or lower its reserve"
        yield found("broker.disk_reserve", read, fix)
    durability = body.get("durability", _DURABLE)
    if durability != _DURABLE:
        read = f"{url}: its durability is {durability}"
        yield found("broker.durability", read, "run the broker without its weaker mode")
    yield from _access(address)
    yield from _delayed(address)
    yield from _keepers(address)
    yield from _room(address)


def _access(address: BrokerAddress) -> Findings:
    """Whether the broker accepts this caller, and whether others can read the traffic."""
    answer = _ask(address, "/v1/caller")
    url = mask_secrets(address.url)
    if not isinstance(answer, str) and answer[0] == 401:
        read = f"{url}: it does not know " + (
            "the token that is configured" if address.has_token else "the caller: there is no token"
        )
        fix = "make one with `qmq broker token add`, and give it as QMQ_BROKER_TOKEN or token_file"
        yield found("broker.access", read, fix)
    if address.has_token and address.is_in_clear:
        fix = "start the broker with --tls-cert and --tls-key, and give its https:// address"
        yield found("broker.token_in_clear", f"{url}: plain HTTP to another machine", fix)


def _delayed(address: BrokerAddress) -> Findings:
    """The reasons why delayed messages are held back; not reported to a caller who may not see all subjects."""
    answer = _ask(address, "/v1/delayed/status", bytes_max=_STATUS_BYTES_MAX)
    if isinstance(answer, str) or answer[0] != 200:
        return
    body, url = answer[1], mask_secrets(address.url)
    if clock := body.get("clock"):
        fix = (
            "set the clock of the broker's machine right, and let a time service keep it so; "
            f"if it is right: qmq delayed accept-clock --broker {url}"
        )
        if ahead_ms := body.get("log_ahead_ms"):
            fix += f", and wait: after {ahead_ms // 1000} s the clock has passed the log"
        read = f"{url}: {clock}; messages held: {body.get('clock_held', 'unknown')}"
        yield found("broker.delayed_clock", read, fix)
    damaged, buckets = body.get("damaged"), body.get("damaged_buckets")
    if damaged or buckets:
        read = f"{url}: messages damaged: {damaged}, hours: {buckets}; {body.get('held')}"
        fix = (
            "restore the damaged files from a backup of the same store; "
            f"qmq delayed retry --broker {url}"
        )
        yield found("broker.delayed_damage", read, fix)


def _keepers(address: BrokerAddress) -> Findings:
    """The archives that retention waits for; not reported to a caller who may not see all subjects,
    nor by an older broker.
    """
    answer = _ask(address, "/v1/keepers")
    if isinstance(answer, str) or answer[0] != 200:
        return
    url = mask_secrets(address.url)
    for keeper in answer[1].get("keepers") or ():
        if held_bytes := keeper.get("held_bytes"):
            name = keeper.get("name")
            read = (
                f"{url}: keeper {name}: last report {keeper.get('age_s', 0):.0f} s ago; {held_bytes} bytes that "
                "retention would delete wait for it"
            )
            fix = f"run its archive; if it no longer exists: qmq broker remove-keeper {name} --broker {url}"
            yield found("broker.keeper", read, fix)


def _room(address: BrokerAddress) -> Findings:
    """Limits that are nearly used up; not reported to a caller who may not see all subjects, nor by an older broker."""
    answer = _ask(address, "/v1/room")
    if isinstance(answer, str) or answer[0] != 200:
        return
    url, body = mask_secrets(address.url), answer[1]
    used = [
        (one.get("name"), one.get("used", 0), one.get("limit", 0))
        for one in body.get("bounds") or ()
    ]
    for token in body.get("tokens") or ():
        for name in ("subjects", "groups", "groups_bytes", "dead_letters_bytes"):
            limit = body.get(f"{name}_per_token", 0)
            used.append((f"{name} of token {token.get('token')}", token.get(name, 0), limit))
    for name, count, limit in used:
        if limit and count >= _USED_SHARE * limit:
            fix = (
                f"qmq broker status --broker {url}; remove unused ones (qmq groups remove, qmq subjects "
                "remove), and replay or purge dead letters (qmq dead)"
            )
            yield found("broker.room", f"{url}: {name}: {count} of {limit}", fix)


def _ask(
    address: BrokerAddress, path: str, *, bytes_max: int = _ANSWER_BYTES_MAX
) -> tuple[int, dict[str, Any]] | str:
    """Status and answer, or the reason why there is none."""
    try:
        status, data = ask(
            "GET", address, path, answer_s_max=_ANSWER_S_MAX, answer_bytes_max=bytes_max
        )
    except TransportError as error:
        return str(error)
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    is_known = isinstance(body, dict) and (status == 200 or not body.keys().isdisjoint(_SAYS_WHY))
    if not is_known:
        return str(
            NotTheBrokerError(url=url_of(address, path), answer=f"status {status}", status=status)
        )
    return status, body
