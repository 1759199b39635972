"""A log that a later version wrote is refused by name."""

from __future__ import annotations

import pytest

from qmq_broker.storage.logs.frame_seek import LogRange
from qmq_pipeline.errors import LaterVersionError
from tests.broker.storage.later import stamped_as
from tests.pipeline.test_log import fill, reader, whole
from tests.pipeline.world import DataDirectory


@pytest.mark.parametrize(("field", "what"), [(4, "version 2"), (5, "kind 99")])
@pytest.mark.parametrize("number", [1, -1])
def test_P1_what_a_later_version_wrote_is_refused_and_not_called_damaged(
    directory: DataDirectory, number: int, field: int, what: str
) -> None:
    fill(directory, 200)
    log = reader(directory)
    bounds = log.bounds()
    path = directory.path / "commitlog" / f"{0:020d}"
    path.write_bytes(stamped_as(number, field, int(what.split()[1]))(path.read_bytes()))
    for read in (
        lambda: list(log.frames(LogRange(bounds.first_offset, bounds.next_offset))),
        lambda: whole(reader(directory)),
    ):
        with pytest.raises(LaterVersionError, match=f"{what}.*Use that version here, too"):
            read()
