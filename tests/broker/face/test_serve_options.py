"""What `qmq broker serve` says of an option that it cannot take."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from qmq_broker.face.commands.broker import SEGMENT_BYTES_MIN, broker
from qmq_broker.face.exit_codes import ExitCode
from tests.broker.face.test_process import HEADERS
from tests.broker.service.rig import make_frame, new_ids
from tests.kit.broker_process import BrokerProcess
from tests.kit.waiting import DEADLINE_S


@pytest.mark.parametrize("given", [1000, 1024, 8 * 1024 * 1024, 8_389_121, 65 * 2**30])
def test_the_rule_for_the_length_of_a_segment_is_reported_as_a_whole(
    tmp_path: Path, given: int
) -> None:
    data = str(tmp_path / "data")
    refused = CliRunner().invoke(broker, ["serve", "--data", data, "--segment-bytes", str(given)])
    told = " ".join(refused.output.split())
    assert refused.exit_code == ExitCode.USAGE
    rule = "a multiple of 512, from 8389120 (room for the largest frame) to 68719476736"
    assert f"'--segment-bytes': {given}; allowed: {rule}." in told
    assert rule in " ".join(CliRunner().invoke(broker, ["serve", "--help"]).output.split())


def test_the_shortest_segment_that_the_rule_allows_is_taken(tmp_path: Path) -> None:
    more = ("--segment-bytes", str(SEGMENT_BYTES_MIN))
    with BrokerProcess(tmp_path / "data", *more) as process:
        frame = make_frame([b"one"], ids=new_ids())
        stored = httpx.post(
            f"{process.url}/v1/send", content=frame, headers=HEADERS, timeout=DEADLINE_S
        )
        assert stored.status_code == 200
