"""X-2: a data directory in which something else stands in the place of a file or a folder."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from qmq_client.errors import QmqError
from tests.broker.service.rig import Rig

Put = Callable[[Path, Path], None]
BODIES = [b"a", b"b", b"c"]
FIRST = "00000000000000000000"
#: One of each kind; those of the second part are folders.
PLACES = [
    *("LOCK", "FORMAT", "checkpoint.0", f"commitlog/{FIRST}", f"consumequeue/orders/{FIRST}"),
    *("actionlog", "consumequeue/orders", "index"),
]
#: Made again from the commit log when it is of no use.
DERIVED = "index"


def link(place: Path, outside: Path) -> None:
    place.symlink_to(outside)


def pipe(place: Path, _: Path) -> None:
    os.mkfifo(place)


def talk(place: Path, outside: Path) -> None:
    """A socket; its path has to be short."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(outside.parent / "s"))
    (outside.parent / "s").rename(place)


def swap(place: Path, outside: Path) -> None:
    """A folder for a file, a file for a folder."""
    if outside.is_dir():
        place.write_bytes(b"x")
    else:
        place.mkdir()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("strange") / "data"
    rig = Rig(directory)
    rig.send(b"a", b"b", key="17")
    rig.settle(rig.pull().ack())
    rig.restart()
    rig.send(b"c")
    rig.close()
    return directory


def seen(outside: Path) -> dict[str, bytes]:
    files = [outside] if outside.is_file() else sorted(outside.rglob("*"))
    return {str(one): one.read_bytes() for one in files if one.is_file()}


def opened(data: Path) -> list[bytes] | str:
    """What a new group is given, or that the start was refused by an error of ours."""
    try:
        rig = Rig(data)
    except QmqError:
        return "refused"
    try:
        return rig.pull(group="new").bodies
    finally:
        rig.close()


@pytest.mark.parametrize("put", [link, pipe, talk, swap])
def test_X_2_whatever_stands_in_the_place_of_a_file_is_not_followed_and_nothing_hangs(
    put: Put, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PLACES:
        damaged, outside = tmp_path / "data", tmp_path / "outside"
        shutil.copytree(data, damaged)
        (damaged / name).rename(outside)
        put(damaged / name, outside)
        before = seen(outside)
        expected = BODIES if name == DERIVED else "refused"
        assert opened(damaged) == expected, name
        assert seen(outside) == before, f"{name} was followed"
        shutil.rmtree(damaged)
        shutil.rmtree(outside) if outside.is_dir() else outside.unlink()
