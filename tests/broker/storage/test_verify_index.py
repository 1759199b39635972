"""`verify` looks at the files of the key index as it does at all others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from qmq_broker.storage.files import layout
from qmq_broker.storage.files.faults import Fault, Level
from qmq_broker.storage.files.small_file import read_file
from qmq_broker.storage.index import key_index
from qmq_broker.storage.index.key_index_file import INDEX_HEADER_BYTES
from qmq_broker.storage.upkeep.verify import verify_store
from tests.broker.storage.damaged import flip
from tests.broker.storage.keyed import Keyed, check_answers
from tests.kit.clock import FakeClock


def indexed() -> Keyed:
    """Several files of the key index, the last of which grows; stopped in order."""
    world = Keyed()
    for number in range(14):
        world.send("a", f"b{number % 3}", None)
        world.catch_up()
    world.store.close()
    return world


def faults(world: Keyed) -> list[Fault]:
    return verify_store(world.disk, FakeClock(), check_groups=len).faults


def names(world: Keyed) -> list[str]:
    return [layout.index_path(name) for name in world.disk.names(layout.INDEX)]


def change(world: Keyed, path: str, how: Callable[[bytes], bytes]) -> None:
    content = how(read_file(world.disk, path) or b"")
    file = world.disk.open(path)
    file.truncate(0)
    file.write(0, [content])
    file.close()


def test_a_whole_index_has_no_faults() -> None:
    world = indexed()
    assert len(names(world)) > 2
    assert faults(world) == []


@pytest.mark.parametrize("room_bytes", [0, 1, INDEX_HEADER_BYTES])
def test_a_file_that_found_no_room_for_its_beginning_is_whole_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    monkeypatch.setattr(key_index, "TAIL_BYTES_MAX", 1)
    world = Keyed()
    for _ in range(4):
        world.send("a", "b", None)
    world.disk.capacity_bytes = 2**40
    world.disk.capacity_bytes -= world.disk.free_bytes() - room_bytes
    for _ in range(3):
        world.store.index.step(200)
    assert read_file(world.disk, names(world)[0]) is not None
    world.disk.capacity_bytes = 2**40
    world.catch_up()
    world.store.close()
    assert faults(world) == []


@pytest.mark.parametrize(
    "how",
    [flip(3), flip(41), flip(-1), flip(-25), lambda content: content[:60], lambda content: b""],
    ids=["header", "slot", "end", "entry", "cut", "empty"],
)
def test_B11_a_sealed_file_that_is_damaged_is_reported_and_made_again(
    how: Callable[[bytes], bytes],
) -> None:
    world = indexed()
    path = names(world)[1]
    change(world, path, how)
    (fault,) = faults(world)
    assert (fault.level, fault.file) == (Level.REBUILT, path)
    world = world.again()
    world.catch_up()
    check_answers(world.store, world.kept)
    world.store.close()
    assert faults(world) == []


@pytest.mark.parametrize("how", [flip(3), flip(-1)], ids=["header", "entry"])
def test_B11_a_growing_file_that_is_damaged_is_reported(how: Callable[[bytes], bytes]) -> None:
    world = indexed()
    path = names(world)[-1]
    change(world, path, how)
    (fault,) = faults(world)
    assert (fault.level, fault.file) == (Level.REBUILT, path)


def test_a_missing_file_a_stray_one_and_a_damaged_table_are_reported() -> None:
    world = indexed()
    first, second, *_ = names(world)
    world.disk.unlink(first)
    (fault,) = faults(world)
    assert (fault.level, fault.file, fault.what) == (Level.REBUILT, first, "missing")
    change(world, layout.INDEX_TABLE, flip(9))
    found = faults(world)
    assert (found[0].level, found[0].file) == (Level.REBUILT, layout.INDEX_TABLE)
    assert {one.level for one in found[1:]} == {Level.IGNORED}
    assert second in {one.file for one in found[1:]}
