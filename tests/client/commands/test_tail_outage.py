"""`qmq tail --follow` when its broker goes away, and comes back as it was or as an older copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.client.commands.test_delivery_commands import qmq, sent
from tests.kit.broker_process import ROOT, BrokerProcess


def test_tail_waits_for_a_broker_that_is_away_and_repeats_and_skips_nothing(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        sent(broker, "orders", 2)
        following = subprocess.Popen(
            [sys.executable, "-u", "-m", "qmq_client.cli", "tail", "orders", "--follow"],
            env=os.environ | {"QMQ_BROKER_URL": broker.url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert following.stdout is not None
            assert following.stderr is not None
            assert [following.stdout.readline().split()[0] for _ in range(2)] == ["0", "1"]
            for first in (2, 4):
                broker.kill()
                assert following.stderr.readline().endswith("; waiting for the broker\n")
                broker.start()
                assert f"continuing with message {first}" in following.stderr.readline()
                sent(broker, "orders", 2)
                told = [following.stdout.readline().split()[0] for _ in range(2)]
                assert told == [f"{first}", f"{first + 1}"]
        finally:
            following.kill()
            following.communicate()


def test_tail_continues_at_the_end_of_an_older_copy_that_was_restored(tmp_path: Path) -> None:
    data, older = tmp_path / "data", tmp_path / "older"
    with BrokerProcess(data) as broker:
        sent(broker, "orders", 2)
        assert qmq(broker, "store", "backup", str(data), str(older)).returncode == 0
        sent(broker, "orders", 3)
        following = subprocess.Popen(
            [sys.executable, "-u", "-m", "qmq_client.cli", "tail", "orders", "--follow"],
            env=os.environ | {"QMQ_BROKER_URL": broker.url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert following.stdout is not None
            assert following.stderr is not None
            assert [following.stdout.readline().split()[0] for _ in range(5)] == list("01234")
            broker.kill()
            assert following.stderr.readline().endswith("; waiting for the broker\n")
            data.rename(tmp_path / "lost")
            older.rename(data)
            broker.start()
            assert "ends at message 2 now" in following.stderr.readline()
            assert "continuing with message 2" in following.stderr.readline()
            sent(broker, "orders", 1)
            assert following.stdout.readline().split()[0] == "2"
        finally:
            following.kill()
            following.communicate()


def test_tail_says_at_once_that_nobody_answers_where_it_is_sent(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        broker.kill()
        done = qmq(broker, "tail", "orders", "--follow", "--first", "0")
    assert done.returncode == 3
