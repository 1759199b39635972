"""F11, F12: a real watchdog whose real broker has stored what it sends, and answers nonsense or nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from tests.client.transport.hostile_server import hostile_server
from tests.faults.spoiler import (
    Spoil,
    Spoiler,
    about_another,
    by_halves,
    refused,
    replaced_by,
    with_garbage,
)
from tests.faults.test_partitioned_watchdog import a_watchdog, stored
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import wait_for
from tests.watchdog.rows import left, make_database, make_due, put_rows, rows_of

GROUP: Final = "f11-f12"
SPOILT: Final[dict[str, Spoil]] = {
    "nothing": replaced_by(b""),
    "500": refused("500 Internal Server Error"),
    "503": refused("503 Service Unavailable"),
    "half an answer": by_halves,
    "garbage": with_garbage,
}
#: Answers of one kind that are spoilt before the next kind comes.
TIMES: Final = 2


def test_F11_F12_O2_O5_spoilt_answers_to_what_was_stored_lose_and_double_nothing(
    broker_process: BrokerProcess, tmp_path: Path
) -> None:
    """Not one row goes before an answer names its frame, and not one message is stored twice."""
    stored(broker_process, GROUP)
    shop = make_database(tmp_path / "shop.db")
    spoiler = Spoiler(broker_process.port)
    answers: list[bytes] = []

    def remember(answer: bytes) -> bytes:
        answers.append(answer)
        return b""

    ids: list[bytes] = []
    with (
        hostile_server(spoiler, is_reading=False) as line,
        a_watchdog(f"sqlite:///{tmp_path / 'shop.db'}", line.url) as log,
    ):

        def is_spoilt(times: int) -> bool:
            make_due(shop)  # tried again, later and later: this is when
            return spoiler.spoilt >= times

        def pass_with(spoil: Spoil) -> None:
            before = spoiler.spoilt
            spoiler.spoil = spoil
            new = put_rows(shop, 3)
            ids.extend(new)
            wait_for(partial(is_spoilt, before + TIMES), log.__str__)
            assert left(shop) == set(new)
            spoiler.spoil = None
            make_due(shop)
            wait_for(lambda: not left(shop), lambda: (rows_of(shop), str(log)))

        for spoil in (remember, *SPOILT.values()):
            pass_with(spoil)
        pass_with(about_another(answers[0]))
    assert sorted(stored(broker_process, GROUP)) == sorted(ids)
    shop.close()
