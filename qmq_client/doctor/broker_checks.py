"""The doctor's checks of the broker; a part of `catalogue.py`."""

from __future__ import annotations

from typing import Final

from qmq_client.doctor.check import Severity, check_of

_BROKER: Final = ("broker",)
_BREAKS, _RISK = Severity.BREAKS, Severity.RISK

BROKER_CHECKS: Final = (
    check_of(
        "broker.unreachable",
        _RISK,
        "O1",
        _BROKER,
        "It does not answer: messages wait in their databases.",
    ),
    check_of(
        "broker.certificate",
        _RISK,
        "O1",
        _BROKER,
        "The broker's certificate has expired or soon will: then every client refuses it, and messages wait in their "
        "databases.",
    ),
    check_of(
        "broker.not_ready",
        _RISK,
        "O1",
        _BROKER,
        "The broker is running but not serving: messages wait in their databases.",
    ),
    check_of(
        "broker.read_only",
        _RISK,
        "O1",
        _BROKER,
        "An operator made the broker read-only: messages wait in their databases until that ends.",
    ),
    check_of(
        "broker.disk_reserve",
        _RISK,
        "B6",
        _BROKER,
        "The disk is down to its reserve: the broker accepts no messages until there is room.",
    ),
    check_of(
        "broker.durability",
        _BREAKS,
        "B1",
        _BROKER,
        "The broker acknowledges messages before they are on disk: a power cut loses some.",
    ),
    check_of(
        "broker.access",
        _RISK,
        "O1",
        _BROKER,
        "The broker does not accept these credentials: messages wait in their databases.",
    ),
    check_of(
        "broker.delayed_clock",
        _RISK,
        "D1",
        _BROKER,
        "The broker's clock was changed: messages delayed before wait longer, or are released "
        "slowly. Or its log is ahead of the clock.",
    ),
    check_of(
        "broker.delayed_damage",
        _RISK,
        "D3",
        _BROKER,
        "Some delayed messages cannot be read and are held back; the others are released on time.",
    ),
    check_of(
        "broker.keeper", _RISK, "B6", _BROKER, "Segments wait for an archive: the disk fills."
    ),
    check_of(
        "broker.room",
        _RISK,
        "B10",
        _BROKER,
        "Most of what callers may create is used: the broker will refuse new subjects, new groups, or new messages.",
    ),
    check_of(
        "broker.token_in_clear",
        _RISK,
        "",
        _BROKER,
        "Anybody listening on the network can read the token and every message.",
    ),
)
