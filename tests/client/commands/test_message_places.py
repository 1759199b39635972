"""`qmq message show | trace` and `qmq delayed show` of an id that several subjects have, and without a broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy.orm import Session

from qmq_client import Message, Producer, create_tables
from qmq_client.commands.root import root
from qmq_client.database.registry import Registry
from qmq_client.errors import BrokerRefusedError
from qmq_client.settings.sections import DatabaseSection, RegistrySection
from qmq_client.wire.requests import ErrorAnswer
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S, wait_for

HOUR_MS = 3_600_000
#: Nobody listens there.
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


def send(broker: BrokerProcess, message_id: str, **bodies: str) -> None:
    """One message for each subject; what ends in `_later` is delayed."""
    for name, body in bodies.items():
        message: dict[str, Any] = {
            "subject": name.removesuffix("_later"),
            "body": body,
            "message_id": message_id,
        }
        if name.endswith("_later"):
            message["delay_ms"] = HOUR_MS
        sent = httpx.post(f"{broker.url}/v1/send", json={"messages": [message]}, timeout=DEADLINE_S)
        assert sent.status_code == 200


def run(broker: BrokerProcess | str, *words: str, code: int = 0) -> Result:
    url = broker if isinstance(broker, str) else broker.url
    ended = CliRunner().invoke(root, [*words, "--broker", url])
    assert ended.exit_code == code, (ended.output, ended.exception)
    return ended


def blocks(text: str) -> list[str]:
    return text.strip().split("\n\n")


def test_each_subjects_delayed_message_is_shown_with_its_own_states_and_body(
    broker: BrokerProcess,
) -> None:
    one = "a1" * 16
    send(broker, one, gate_later="of the gate", seat_later="of the seat")
    run(broker, "delayed", "cancel", one, "--subject", "gate")
    for command in (["delayed", "show"], ["message", "show"], ["message", "trace"]):
        seat, gate = blocks(run(broker, *command, one).stdout)  # the newest first
        assert ("cancelled" in gate, "pending" in gate) == (True, False), gate
        assert ("cancelled" in seat, "pending" in seat) == (False, True), seat
        assert "gate" in gate
        assert "seat" in seat
        assert ("of the seat" in seat, "of the gate" in gate) == (True, False)
    told = json.loads(run(broker, "delayed", "show", one, "--json").stdout)
    assert {one["subject"]: bool(one["message"]) for one in told["messages"]} == {
        "gate": False,
        "seat": True,
    }


@pytest.mark.parametrize("command", ["show", "trace"])
def test_what_is_stored_in_one_subject_and_waits_in_another_is_shown_at_both(
    broker: BrokerProcess, command: str
) -> None:
    one = {"show": "b1", "trace": "b2"}[command] * 16
    send(broker, one, orders="of the orders", bills_later="of the bills")
    orders, bills = blocks(run(broker, "message", command, one).stdout)
    assert "orders" in orders
    assert "bills" not in orders
    assert "pending" in bills
    assert "of the bills" in bills
    told = json.loads(run(broker, "message", command, one, "--json").stdout)
    assert [place["subject"] for place in told["delayed"]["places"]] == ["bills"]
    assert len(told["messages" if command == "show" else "stories"]) == 1


def test_a_trace_of_two_subjects_says_which_is_which(broker: BrokerProcess) -> None:
    one = "c1" * 16
    send(broker, one, left="1", right="2")
    told = blocks(run(broker, "message", "trace", one).stdout)
    assert [block.splitlines()[0] for block in told] == ["right 0", "left 0"]
    assert len(blocks(run(broker, "message", "show", one).stdout)) == 2


def test_subjects_come_in_one_order_whether_the_message_waits_or_is_stored(
    broker: BrokerProcess,
) -> None:
    stored, waiting = "c4" * 16, "c5" * 16
    for subject in ("north", "south", "east"):
        send(broker, stored, **{subject: "x"})
        send(broker, waiting, **{f"{subject}_later": "x"})

    def order(*words: str) -> list[str]:
        names = ("north", "south", "east")
        told = blocks(run(broker, *words).stdout)
        return [next(name for name in names if name in block) for block in told]

    newest_first = ["east", "south", "north"]
    for command in ("show", "trace"):
        assert order("message", command, stored) == newest_first
        assert order("message", command, waiting) == newest_first
    assert order("delayed", "show", waiting) == newest_first


def test_an_id_that_no_subject_has_is_looked_for_elsewhere_by_show(broker: BrokerProcess) -> None:
    one = "c6" * 16
    send(broker, one, later_later="x")
    said = run(broker, "message", "find", "--id", one, code=1).stderr
    assert f"`qmq message show {one}` also looks among delayed messages and in outboxes" in said
    assert "pending" in run(broker, "message", "show", one).stdout


def test_one_message_is_shown_as_ever(broker: BrokerProcess) -> None:
    one = "d1" * 16
    send(broker, one, alone="x")
    assert len(blocks(run(broker, "message", "show", one).stdout)) == 1
    told = run(broker, "message", "trace", one).stdout
    assert told.splitlines()[0].split() == ["at", "group", "what", "attempt", "consumer", "why"]
    assert "delayed" not in json.loads(run(broker, "message", "show", one, "--json").stdout)


@pytest.fixture
def database(tmp_path: Path) -> tuple[str, str]:
    """An outbox with one row, and the id of its message."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    engine = sa.create_engine(url)
    create_tables(engine)
    with Producer(engine, NOWHERE) as producer, Session(engine) as session:
        message_id = producer.send(Message("orders", "unsent"), session=session)
        session.commit()
    engine.dispose()
    return url, message_id


@pytest.mark.parametrize("command", ["show", "trace"])
def test_without_a_broker_the_outbox_is_looked_into_all_the_same(
    database: tuple[str, str], command: str
) -> None:
    url, message_id = database
    ended = run(NOWHERE, "message", command, message_id, "--database", url, code=3)
    assert f"{message_id} is in the outbox of shop: live, due " in ended.stdout
    assert "the broker could not be asked" in ended.stderr
    assert "no connection" in ended.stderr
    ended = run(NOWHERE, "message", command, message_id, "--database", url, "--json", code=3)
    (row,) = json.loads(ended.stdout)["outbox"]
    assert (row["message_id"], row["database"]) == (message_id, "shop")
    ended = run(NOWHERE, "message", command, "0" * 32, "--database", url, code=3)
    assert (ended.stdout, "is not in the outbox of shop" in ended.stderr) == ("", True)


@pytest.fixture
def registry(
    database: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Registry:
    """The only configured place, with that database and one that cannot be read."""
    url = f"sqlite:///{tmp_path / 'control.db'}"
    (tmp_path / "qmq.toml").write_text(f'[registry]\nurl = "{url}"\n')
    monkeypatch.chdir(tmp_path)
    made = Registry(RegistrySection(url=url), {})
    made.create()
    made.add(DatabaseSection(name="shop", url=database[0]))
    return made


@pytest.mark.parametrize("command", ["show", "trace"])
def test_databases_of_the_registry_are_looked_into(
    broker: BrokerProcess, database: tuple[str, str], registry: Registry, command: str
) -> None:
    _, message_id = database
    told = f"{message_id} is in the outbox of shop: live, due "
    assert told in run(broker, "message", command, message_id).stdout
    assert told in run(NOWHERE, "message", command, message_id, code=3).stdout
    run(broker, "message", command, "0" * 32, code=1)
    registry.add(DatabaseSection(name="gone", url="sqlite:////nowhere/gone.db"))
    ended = run(broker, "message", command, "0" * 32, code=3)
    assert "it may be in an outbox that could not be read: gone" in ended.stderr


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_registry_that_cannot_be_read_is_reported(
    broker: BrokerProcess, registry: Registry, command: str
) -> None:
    Path("control.db").unlink()
    ended = run(broker, "message", command, "0" * 32, code=3)
    assert "it may be in an outbox that could not be read: [registry]" in ended.stderr


@pytest.mark.parametrize("command", ["show", "trace"])
def test_without_a_broker_and_a_database_the_option_is_named(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run(NOWHERE, "message", command, "0" * 32, code=3)
    assert "give --database" in ended.stderr


@pytest.mark.parametrize("command", ["show", "trace"])
def test_what_was_not_looked_at_is_said_although_nothing_was_found(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def answer(_: object, path: str, *__: object, **___: object) -> dict[str, Any]:
        if path.startswith("/v1/delayed"):
            return {"places": [], "messages": []}
        return {"messages": [], "places": [], "is_complete": False}

    monkeypatch.setattr("qmq_client.commands.message.get_json", answer)
    ended = run(NOWHERE, "message", command, "c1" * 16, code=1)
    assert "the search was incomplete" in ended.stderr
    assert "is in no subject" in ended.stderr


def test_a_broker_that_refuses_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> dict[str, Any]:
        raise BrokerRefusedError(403, ErrorAnswer(code="forbidden", message="no role"))

    monkeypatch.setattr("qmq_client.commands.message.get_json", refuse)
    ended = run(NOWHERE, "message", "show", "c2" * 16, code=1)
    assert "could not be asked" not in ended.stderr


@pytest.mark.parametrize("command", ["show", "trace"])
def test_a_database_that_cannot_be_read_is_not_said_to_have_nothing(
    broker: BrokerProcess, tmp_path: Path, command: str
) -> None:
    there = ("--database", f"sqlite:///{tmp_path}/nosuch.db")
    up = run(broker, "message", command, "c3" * 16, *there, code=3).stderr
    assert "it may be in an outbox that could not be read: nosuch" in up
    down = run(NOWHERE, "message", command, "c3" * 16, *there, code=3).stderr
    assert "is not in the outbox" not in down
    assert "there is no file" in down


def test_a_message_put_off_to_the_past_is_not_late(broker: BrokerProcess) -> None:
    one = "c4" * 16
    send(broker, one, past_later="now")
    run(broker, "delayed", "reschedule", one, "2016-12-01")
    wait_for(lambda: "past" in run(broker, "message", "show", one).stdout, "it was not released")
    told = json.loads(run(broker, "delayed", "status", "--json").stdout)
    assert told["late_max_ms"] < HOUR_MS


def test_a_trace_of_several_subjects_says_what_is_missing_of_which(broker: BrokerProcess) -> None:
    one = "c5" * 16
    send(broker, one, here="a", there="b")
    missing = run(broker, "message", "trace", one).stderr.splitlines()
    assert sorted(line.partition(":")[0] for line in missing) == ["here", "there"]


@pytest.mark.parametrize(
    "words",
    [
        ("send", "here", "x", "--delay", "-1"),
        (
            "message",
            "find",
            "--subject",
            "a",
            "--key",
            "k",
            "--from",
            "2027-01-01",
            "--to",
            "2026-01-01",
        ),
        ("message", "find", "--subject", "a", "--key", "k", "--id", "c6" * 16),
    ],
)
def test_what_can_only_be_a_mistake_is_a_wrong_call(
    broker: BrokerProcess, words: tuple[str, ...]
) -> None:
    run(broker, *words, code=2)


def test_subjects_for_programs_have_what_the_table_has(broker: BrokerProcess) -> None:
    send(broker, "c7" * 16, counted="a")
    listed = json.loads(run(broker, "subjects", "--json").stdout)["subjects"]
    assert {one["subject"]: one["messages"] for one in listed}["counted"] == 1
