"""Files of the logs over HTTP: what may be read, as far as it is durable, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from qmq_broker.face.routes.ranges import READ_BYTES_MAX
from qmq_client.wire.frame import parse_message_frame
from tests.broker.face.asgi import Client, Reply
from tests.broker.service.rig import Rig, make_frame

SEGMENT = f"commitlog/{0:020d}"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "data")
    made.store.append([parse_message_frame(make_frame([b"body"] * 20))])
    made.store.commit_and_step()
    yield made
    made.close()


def get(rig: Rig, route: str, **parameters: str | int) -> Reply:
    return Client(rig).get(f"{route}?{urlencode(parameters)}")


def test_the_files_of_the_logs_are_listed_and_no_other(rig: Rig) -> None:
    assert get(rig, "/v1/files", directory="commitlog").json["names"] == [f"{0:020d}"]
    assert "FORMAT" in get(rig, "/v1/files").json["names"]
    assert not {"LOCK", "CLEAN"} & set(get(rig, "/v1/files").json["names"])
    for directory in ("..", "/", "quarantine", "commitlog/..", "consumequeue"):
        assert get(rig, "/v1/files", directory=directory).status == 422


def test_B2_bytes_are_those_of_the_disk_and_end_with_what_is_durable(rig: Rig) -> None:
    durable = rig.store.durable_offset
    on_disk = (rig.directory / SEGMENT).read_bytes()
    answer = get(rig, "/v1/files/read", path=SEGMENT, first=8, count=READ_BYTES_MAX)
    assert answer.body == on_disk[8:durable]
    rig.store.append([parse_message_frame(make_frame([b"not synced"]))])
    again = get(rig, "/v1/files/read", path=SEGMENT, first=8, count=READ_BYTES_MAX)
    assert again.body == answer.body
    assert get(rig, "/v1/files/read", path=SEGMENT, first=durable, count=100).body == b""


def test_behind_the_end_of_a_file_there_is_nothing_however_far(rig: Rig) -> None:
    for path in (SEGMENT, "FORMAT"):
        for first, status in ((2**62, 200), (2**63 - 1 - READ_BYTES_MAX, 200), (2**63 - 1, 422)):
            answer = get(rig, "/v1/files/read", path=path, first=first, count=READ_BYTES_MAX)
            assert answer.status == status
            assert status != 200 or answer.body == b""


@pytest.mark.parametrize(
    "path",
    [
        "LOCK",
        "../secret",
        "commitlog/../FORMAT",
        "commitlog/spare.0",
        "/etc/passwd",
        "",
        "state/groups.0",
    ],
)
def test_nothing_but_the_logs_is_given(rig: Rig, path: str) -> None:
    assert get(rig, "/v1/files/read", path=path, first=0, count=10).status == 422


def test_a_segment_that_is_not_there_is_404_and_a_bad_number_422(rig: Rig) -> None:
    missing = "checkpoint.1"
    (rig.directory / missing).unlink(missing_ok=True)
    assert get(rig, "/v1/files/read", path=missing, first=0, count=10).status == 404
    for first, count in [("-1", "1"), ("x", "1"), ("0", str(READ_BYTES_MAX + 1)), ("٣", "1")]:
        answer = get(rig, "/v1/files/read", path="FORMAT", first=first, count=count)
        assert answer.status == 422
