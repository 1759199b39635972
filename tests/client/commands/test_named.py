"""Names and ids that are none are refused before a broker is asked: as they were typed, and with exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import click
import httpx
import pytest
from click.testing import CliRunner

from qmq_client.commands.listing import found_commands
from qmq_client.commands.named import GROUP, MESSAGE_ID, NEW_MESSAGE_ID, SUBJECT
from qmq_client.commands.root import root
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S

#: Nobody listens there.
NOWHERE = "http://127.0.0.1:9"
TYPES = {
    "subject": [SUBJECT],
    "group": [GROUP],
    "message_id": [MESSAGE_ID, NEW_MESSAGE_ID],
    "message_ids": [MESSAGE_ID],
}
#: Filters of what is in a database or on a disk, where such a name may be what is wrong.
FILTERS = {"outbox list", "outbox retry", "outbox purge", "store dump"}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that there is, with what one types."""
    for name in found_commands():
        command = root.get_command(click.Context(root), name)
        assert command is not None
        yield from below(name, command)


def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for sub_name, one in command.commands.items():
            yield from below(f"{name} {sub_name}", one)


def test_every_name_that_a_command_takes_is_checked_where_it_is_typed() -> None:
    taken = 0
    for name, command in commands():
        for one in command.params:
            if one.name in TYPES and not (name in FILTERS and one.name == "subject"):
                taken += 1
                assert one.type in TYPES[one.name], f"{name}: {one.name}"
    assert taken > 40


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        ("subjects remove Bad/Name", "'Bad/Name'"),
        ("delayed reschedule ZZ 2030-01-01", "'ZZ'"),
        (f"delayed reschedule {'a' * 32} 2030-01-01 --subject -x", "'-x'"),
        ("delayed cancel ZZ", "'ZZ'"),
        ("message show ZZ", "'ZZ'"),
        ("message trace XyZ", "'XyZ'"),
        ("outbox show ZZ --database sqlite://", "'ZZ'"),
        ("outbox retry ZZ --database sqlite://", "'ZZ'"),
        ("groups pause orders a@b@c", "'a@b@c'"),
        ("dead replay orders .", "'.'"),
        ("tail ..", "'..'"),
        ("send x/y body", "'x/y'"),
        ("lag --group a:b", "'a:b'"),
    ],
)
def test_S7_what_is_none_is_refused_as_it_was_typed(words: str, typed: str) -> None:
    ended = CliRunner().invoke(root, words.split(), env={"QMQ_BROKER_URL": NOWHERE})
    assert ended.exit_code == 2, ended.output
    assert f"{typed}; allowed: " in ended.stderr


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("named") / "data") as running:
        yield running


@pytest.mark.parametrize(
    "words",
    [
        "subjects remove _qmq.copies --yes",
        "groups configure orders audit --tag .",
        "broker remove-keeper .. --yes",
        f"delayed reschedule {'a' * 32} 2999-01-01",
        "delayed cancel " + "a" * 32 + " --subject _qmq.copies",
    ],
)
def test_S7_what_only_the_broker_knows_to_be_wrong_is_a_wrong_call_as_well(
    broker: BrokerProcess, words: str
) -> None:
    env = {"QMQ_BROKER_URL": broker.url}
    ended = CliRunner().invoke(root, words.split(), env=env)
    assert ended.exit_code == 2, ended.output


def test_an_id_that_two_subjects_have_names_the_option_that_tells_them_apart(
    broker: BrokerProcess,
) -> None:
    one = "cd" * 16
    for subject in ("gate", "seat"):
        message = {"subject": subject, "body": 1, "message_id": one, "delay_ms": 3_600_000}
        sent = httpx.post(f"{broker.url}/v1/send", json={"messages": [message]}, timeout=DEADLINE_S)
        assert sent.status_code == 200
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    words = ["delayed", "reschedule", one.upper(), tomorrow, "--broker", broker.url]
    ended = CliRunner().invoke(root, words)
    assert ended.exit_code == 2, ended.output
    assert "gate, seat" in ended.stderr
    assert "--subject" in ended.stderr
