"""A token that the broker refuses costs no row anything: neither an attempt nor its place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from qmq_client.message import Message
from qmq_client.publishing.forbidden import ForbiddenSubjects
from qmq_client.transport.address import BrokerAddress
from qmq_client.transport.http import HttpTransport
from tests.broker.face.guard import add_token
from tests.client.publishing import sweep, with_transport
from tests.client.world import OUTBOX, World, a_world
from tests.kit.broker_process import BrokerProcess

STRANGER = "qmq_0123456789abcdef_" + "5" * 64
MINE, OTHERS = "orders.eu", "bills"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def broker(tmp_path: Path, tokens: Path) -> Iterator[BrokerProcess]:
    add_token(tokens, "admin", name="somebody-else")
    with BrokerProcess(tmp_path / "broker", "--tokens", str(tokens)) as broker:
        yield broker


def as_(broker: BrokerProcess, token: str) -> closing[HttpTransport]:
    return closing(HttpTransport(BrokerAddress(url=broker.url, token=token)))


def test_O1_a_refused_token_is_an_outage_that_costs_no_attempt_and_parks_nothing(
    world: World, broker: BrokerProcess, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.producer.send_now_many([Message(MINE, f"{i}") for i in range(3)])
    with as_(broker, STRANGER) as transport, caplog.at_level(logging.WARNING):
        with_transport(world, transport)
        flushed = world.producer.flush()
        world.make_due()
        world.transport = transport
        assert sweep(world).unreachable
    assert (flushed.accepted, flushed.left, flushed.parked) == (0, 3, 0)
    rows = world.read(f"SELECT DISTINCT state, attempts FROM {OUTBOX}")
    assert rows == [(0, 0)]
    assert "401 unauthenticated" in caplog.text
    assert "QMQ_BROKER_TOKEN" in caplog.text
    assert STRANGER not in caplog.text
    text = add_token(tokens, "producer:orders.*")[1]
    broker.wait_for(" tokens_read ")
    with as_(broker, text) as transport:
        world.transport = transport
        world.make_due()
        assert len(sweep(world).sent) == 3
    assert world.stored_ids() == set()


def test_O6_rows_of_a_forbidden_subject_wait_and_hold_up_no_others(
    world: World, broker: BrokerProcess, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = add_token(tokens, "producer:orders.*")[1]
    broker.wait_for(" tokens_read ")
    subjects = [MINE, OTHERS, MINE, "not.mine", OTHERS, MINE]
    world.producer.send_now_many([Message(subject, "x") for subject in subjects])
    with as_(broker, text) as transport, caplog.at_level(logging.WARNING):
        with_transport(world, transport)
        flushed = world.producer.flush()
    assert (flushed.accepted, flushed.left, flushed.parked) == (3, 3, 0)
    left = world.read(f"SELECT DISTINCT subject, state, attempts FROM {OUTBOX} ORDER BY subject")
    assert left == [(OTHERS, 0, 0), ("not.mine", 0, 0)]
    assert caplog.text.count(f"messages of subject {OTHERS} wait") == 1
    assert "--role producer:SUBJECTS" in caplog.text


def test_W8_a_forbidden_subject_is_reported_less_and_less_often_and_its_end_once(
    world: World, tmp_path: Path, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = add_token(tokens, "producer:orders.*", name="narrow")[1]
    wide = add_token(tokens, "producer:*", name="wide")[1]
    caplog.set_level(logging.INFO, "qmq.publish")
    with (
        BrokerProcess(tmp_path / "broker", "--tokens", str(tokens)) as broker,
        as_(broker, narrow) as refused,
        as_(broker, wide) as taken,
    ):
        for transport in (*[refused] * 9, taken, taken):
            world.producer.send_now_many([Message(MINE, "x"), Message(OTHERS, "x")])
            with_transport(world, transport)
            world.producer.flush()
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    waits = [f"messages of subject {OTHERS} wait, refusals={count}" for count in (1, 2, 4, 8)]
    assert lines == [*waits, f"messages of subject {OTHERS} are accepted again, refusals=9"]


def test_subjects_without_end_are_remembered_up_to_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    forbidden = ForbiddenSubjects()
    for number in range(3_000):
        forbidden.refused(f"orders.{number}", PermissionError("no"))
    assert len(forbidden._refusals) == 1_000
