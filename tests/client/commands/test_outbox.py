"""`qmq outbox`: look at rows, arm them again, delete them for good."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.ids import MESSAGE_IDS
from qmq_client.outbox.database.sqlite import NOW_MS
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, PARKED, SENT, create_tables

OUTBOX = DEFAULT_TABLES.outbox
HOUR_MS = 3_600_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    made = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
    create_tables(made)
    yield made
    made.dispose()


def put(
    engine: sa.Engine,
    *,
    state: int = LIVE,
    due_in_ms: int = 0,
    age_ms: int = 0,
    subject: str = "orders.created",
    error: str = "BrokerRefusedError: too odd",
) -> str:
    """Store one row; its message id as people see it."""
    message_id = MESSAGE_IDS.next_id()
    now_ms = sa.literal_column(NOW_MS, sa.BigInteger())
    row = sa.insert(OUTBOX).values(
        message_id=message_id,
        subject=subject,
        record=b"record",
        state=state,
        due_at_ms=now_ms + due_in_ms,
        attempts=7 if state == PARKED else 0,
        last_error=error if state == PARKED else None,
        created_at_ms=now_ms - age_ms,
    )
    with engine.begin() as connection:
        connection.execute(row)
    return message_id.hex()


def outbox(engine: sa.Engine, *arguments: str, answer: str | None = None) -> Result:
    command, *rest = arguments
    call = ["outbox", command, "--database", str(engine.url), *rest]
    return CliRunner().invoke(root, call, input=answer)


def listed(engine: sa.Engine, *arguments: str) -> dict[str, Any]:
    result = outbox(engine, "list", "--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def ids(found: dict[str, Any]) -> list[str]:
    return [row["message_id"] for row in found["rows"]]


def test_list_says_where_it_cuts_an_error_short(engine: sa.Engine) -> None:
    put(engine, state=PARKED, error="x" * 60)
    put(engine, state=PARKED, error="y" * 61)
    text = outbox(engine, "list").output
    assert "x" * 60 + "\n" in text
    assert "y" * 59 + "…\n" in text


def test_list_tells_live_due_and_parked_apart(engine: sa.Engine) -> None:
    due = put(engine, due_in_ms=-1)
    waiting = put(engine, due_in_ms=HOUR_MS)
    parked = put(engine, state=PARKED)
    found = listed(engine)
    assert ids(found) == [due, waiting, parked]
    assert found["counts"] == {"live": 2, "due": 1, "parked": 1, "sent": 0}
    assert found["has_more"] is False
    assert ids(listed(engine, "--state", "live")) == [due, waiting]
    assert ids(listed(engine, "--state", "due")) == [due]
    assert ids(listed(engine, "--state", "parked")) == [parked]
    first = listed(engine, "--limit", "1")
    assert (ids(first), first["has_more"]) == ([due], True)


def test_list_for_people_is_a_line_for_each_row_and_the_counts(engine: sa.Engine) -> None:
    parked = put(engine, state=PARKED)
    head, row, counts = outbox(engine, "list").output.splitlines()
    assert head.split() == ["message_id", "state", "subject", "attempts", "due_at", "last_error"]
    assert row.split()[:4] == [parked, "parked", "orders.created", "7"]
    assert row.endswith("BrokerRefusedError: too odd")
    for column in ("state", "subject", "attempts", "due_at", "last_error"):
        before, _, after = row[head.index(column) - 1 :].partition(" ")
        assert (before, after[0] != " ") == ("", True), "columns stand under their names"
    assert counts == "live 0, of them due 0; parked 1; sent 0"


def test_list_says_when_there_are_more_rows_and_counts_those_that_were_sent(
    engine: sa.Engine,
) -> None:
    for _ in range(3):
        put(engine, subject="stock.moved")
    put(engine)
    put(engine, state=SENT)
    lines = outbox(engine, "list", "--limit", "2", "--subject", "stock.moved").output.splitlines()
    assert lines[-2:] == [
        "2 of 3 rows; --limit shows more",
        "live 4, of them due 4; parked 0; sent 1",
    ]
    lines = outbox(engine, "list", "--limit", "1", "--state", "due").output.splitlines()
    assert lines[-2] == "1 of 4 rows; --limit shows more"


def test_show_tells_all_of_one_row(engine: sa.Engine) -> None:
    parked = put(engine, state=PARKED)
    found = json.loads(outbox(engine, "show", parked, "--json").output)
    assert found["message_id"] == parked
    assert (found["state"], found["attempts"], found["is_owned"]) == ("parked", 7, False)
    assert found["record_bytes"] == len(b"record")
    text = outbox(engine, "show", parked).output
    assert "last_error    BrokerRefusedError: too odd" in text


def test_show_of_a_row_that_is_not_there_exits_with_1(engine: sa.Engine) -> None:
    result = outbox(engine, "show", "0" * 32)
    assert result.exit_code == 1
    assert "is not in the outbox" in result.output


def test_an_id_that_is_none_is_a_wrong_call(engine: sa.Engine) -> None:
    result = outbox(engine, "show", "xyz")
    assert result.exit_code == 2
    assert "32 lower-case hex digits" in result.output


def test_O7_retry_arms_parked_rows_again(engine: sa.Engine) -> None:
    first, second = put(engine, state=PARKED), put(engine, state=PARKED)
    live = put(engine, due_in_ms=HOUR_MS)
    done = outbox(engine, "retry", first, live)
    assert (done.stdout, done.exit_code) == ("retried 1\n", 1)
    assert "1 of 2 ids have no row in that state" in done.stderr
    assert ids(listed(engine, "--state", "due")) == [first]
    assert ids(listed(engine, "--state", "parked")) == [second]
    assert json.loads(outbox(engine, "retry", "--all", "--json").output) == {"retried": 1}
    found = listed(engine)
    assert {row["state"] for row in found["rows"]} == {"live"}
    assert {row["attempts"] for row in found["rows"]} == {0}


@pytest.mark.parametrize("command", ["retry", "purge"])
def test_which_rows_are_meant_must_be_said(engine: sa.Engine, command: str) -> None:
    parked = put(engine, state=PARKED)
    for arguments in ([], [parked, "--all"]):
        result = outbox(engine, command, *arguments)
        assert result.exit_code == 2
        assert "Give message ids, a filter (--subject, --error, …), or --all." in result.output
    assert ids(listed(engine)) == [parked]


def test_purge_asks_first(engine: sa.Engine) -> None:
    parked = put(engine, state=PARKED)
    refused = outbox(engine, "purge", "--all", answer="n\n")
    assert refused.exit_code == 1
    assert "Delete 1 parked row of database shop unsent?" in refused.output
    assert ids(listed(engine)) == [parked]
    assert outbox(engine, "purge", "--all", answer="y\n").exit_code == 0
    assert ids(listed(engine)) == []


def test_purge_for_programs_never_asks_and_says_so(engine: sa.Engine) -> None:
    parked = put(engine, state=PARKED)
    refused = outbox(engine, "purge", "--all", "--json", answer="y\n")
    assert refused.exit_code == 2
    assert "--yes: not given, and --json does not ask." in refused.output
    assert ids(listed(engine)) == [parked]
    done = outbox(engine, "purge", "--all", "--json", "--yes")
    assert json.loads(done.stdout) == {"purged": 1}


@pytest.mark.parametrize("arguments", [("retry",), ("purge", "--yes")])
def test_a_row_that_was_named_and_is_not_there_is_reported(
    engine: sa.Engine, arguments: tuple[str, ...]
) -> None:
    missed = outbox(engine, *arguments, "0" * 32)
    assert missed.exit_code == 1
    assert "1 of 1 ids have no row" in missed.stderr
    named_twice = put(engine, state=PARKED)
    assert outbox(engine, *arguments, named_twice, named_twice).exit_code == 0


def test_purge_deletes_only_what_was_meant(engine: sa.Engine) -> None:
    live = put(engine)
    old = put(engine, state=PARKED, age_ms=2 * HOUR_MS)
    young = put(engine, state=PARKED)
    result = outbox(engine, "purge", "--all", "--yes", "--older-than", "1h")
    assert result.output == "purged 1\n"
    assert set(ids(listed(engine))) == {live, young}
    missed = outbox(engine, "purge", live, "--yes")
    assert (missed.stdout, missed.exit_code) == ("purged 0\n", 1), "it is not parked"
    assert outbox(engine, "purge", live, "--yes", "--state", "live").output == "purged 1\n"
    assert ids(listed(engine)) == [young]
    assert old not in ids(listed(engine))


def test_a_database_without_the_tables_says_what_to_run(tmp_path: Path) -> None:
    path = tmp_path / "bare.db"
    path.touch()
    engine = sa.create_engine(f"sqlite:///{path}")
    for command in (["list"], ["show", "0" * 32], ["retry", "--all"]):
        result = outbox(engine, *command)
        assert result.exit_code == 2
        assert "qmq db migrate" in result.output


def test_an_id_that_is_none_is_answered_with_where_to_find_one(engine: sa.Engine) -> None:
    refused = outbox(engine, "show", "nope")
    assert refused.exit_code == 2
    assert "Copy it from" in refused.output


@pytest.mark.parametrize("group", ["outbox", "db", "config", "watchdog"])
def test_no_summary_of_a_command_is_cut(group: str) -> None:
    shown = CliRunner().invoke(root, [group, "--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2]


def test_O7_rows_are_chosen_by_subject_error_text_and_age_together(engine: sa.Engine) -> None:
    hour_old = put(engine, state=PARKED, subject="stock.moved", age_ms=HOUR_MS)
    young = put(engine, state=PARKED, subject="stock.moved")
    other = put(engine, state=PARKED, error="damaged: 50% of it_self")
    similar = put(engine, state=PARKED, error="damaged: 50 of itself")
    assert set(ids(listed(engine, "--subject", "stock.moved"))) == {hour_old, young}
    assert ids(listed(engine, "--subject", "stock.moved", "--older-than", "59m")) == [hour_old]
    assert ids(listed(engine, "--error", "50% of it_")) == [other], "no wildcards"
    assert outbox(engine, "retry", "--error", "50% of").output == "retried 1\n"
    assert outbox(engine, "purge", "--subject", "stock.moved", "--yes").output == "purged 2\n"
    assert set(ids(listed(engine))) == {other, similar}
    assert ids(listed(engine, "--state", "parked")) == [similar]


def test_a_filter_chooses_among_named_rows_too(engine: sa.Engine) -> None:
    mine = put(engine, state=PARKED, subject="stock.moved")
    other = put(engine, state=PARKED)
    call = ("retry", mine, other, "--subject", "stock.moved")
    assert outbox(engine, *call).output == "retried 1\n"
    assert ids(listed(engine, "--state", "parked")) == [other]


def test_more_rows_than_one_batch_takes_are_retried_by_one_call(engine: sa.Engine) -> None:
    now_ms = sa.literal_column(NOW_MS, sa.BigInteger())
    rows = [
        {"message_id": MESSAGE_IDS.next_id(), "subject": "a", "record": b"", "attempts": 1}
        for _ in range(10_050)
    ]
    insert = sa.insert(OUTBOX).values(state=PARKED, due_at_ms=now_ms, created_at_ms=now_ms)
    with engine.begin() as connection:
        connection.execute(insert, rows)
    assert outbox(engine, "retry", "--all").output == "retried 10050\n"


@pytest.mark.parametrize("duration", ["", "1", "-1h", "h", "1w", "1 h"])
def test_a_duration_that_is_none_is_a_wrong_call(engine: sa.Engine, duration: str) -> None:
    result = outbox(engine, "list", "--older-than", duration)
    assert result.exit_code == 2
    assert "write 90s, 15m, 2h or 7d" in result.output


def test_too_many_ids_are_a_wrong_call(engine: sa.Engine) -> None:
    result = outbox(engine, "retry", *["0" * 32] * 501)
    assert result.exit_code == 2
    assert "message ids: 501; allowed: 500" in result.output
