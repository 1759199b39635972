"""Errors carry fields, have codes of their own, and one root."""

from __future__ import annotations

import pickle

import pytest

from qmq_client.errors import BrokerBusyError, BrokerRefusedError, ConfigurationError
from qmq_client.wire import errors
from qmq_client.wire.errors import (
    ChecksumError,
    EncodingError,
    InvalidMessageError,
    InvalidNameError,
    ProtocolError,
    QmqError,
    TooLargeError,
    UnknownVersionError,
)
from qmq_client.wire.requests import ErrorAnswer

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QmqError)
]


def test_the_tree_is_the_one_that_the_module_draws() -> None:
    drawn = [
        line.split()[0]
        for line in (errors.__doc__ or "").replace("│", " ").replace("├──", "").replace("└──", "").splitlines()
        if line.startswith("    ")
    ]  # fmt: skip
    assert drawn == [kind.__name__ for kind in KINDS]
    assert {kind for kind in KINDS if kind.__mro__[1] is InvalidMessageError} == {
        InvalidNameError,
        TooLargeError,
        EncodingError,
    }
    assert {kind for kind in KINDS if kind.__mro__[1] is ProtocolError} == {
        ChecksumError,
        UnknownVersionError,
    }


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


def test_an_invalid_message_says_field_value_limit_and_remedy() -> None:
    error = TooLargeError(field="key", limit="255 bytes", value="256 bytes", remedy="Shorten it.")
    assert str(error) == "key: 256 bytes; allowed: 255 bytes. Shorten it."
    assert (error.field, error.limit, error.value, error.remedy) == (
        "key",
        "255 bytes",
        "256 bytes",
        "Shorten it.",
    )


def test_a_protocol_error_says_where() -> None:
    assert str(ProtocolError("frame length", offset=8)) == "frame length (at byte 8)"
    error = ProtocolError("JSON")
    assert (str(error), error.message, error.offset) == ("JSON", "JSON", None)


@pytest.mark.parametrize(
    "error",
    [
        TooLargeError(field="key", limit="255 bytes", value="256 bytes", remedy="Shorten it."),
        InvalidNameError(field="subject", limit="names", value="'..'", remedy="Choose another."),
        ProtocolError("frame length", offset=8),
        ChecksumError("record"),
        ConfigurationError(setting="lease_ms", value="0", remedy="Give 1 or more."),
        BrokerBusyError("busy", retry_after_s=1.5),
        BrokerRefusedError(409, ErrorAnswer(code="id_conflict", message="other content")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_between_processes(error: QmqError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)
