"""What is asked of a broker for the bytes of its files: nothing twice, and nothing for nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from qmq_broker.storage.files import layout
from qmq_client.transport.address import BrokerAddress
from qmq_pipeline.errors import SourceError
from qmq_pipeline.places.remote import AHEAD_BYTES, RemoteDisk

MIB = 1024 * 1024
SEGMENT = layout.segment_path(layout.COMMIT_LOG, 0)
CONTENT = bytes(range(256)) * (20 * MIB // 256)


class Files(BaseHTTPRequestHandler):
    """Serves `content` as every file; answers break off after the bytes named in `breaks`, one by one."""

    protocol_version = "HTTP/1.1"
    content: ClassVar[bytes] = CONTENT
    breaks: ClassVar[list[int]] = []
    #: First byte and number of bytes of each request.
    asked: ClassVar[list[tuple[int, int]]] = []

    def do_GET(self) -> None:
        question = parse_qs(urlsplit(self.path).query)
        first, count = (int(question[name][0]) for name in ("first", "count"))
        self.asked.append((first, count))
        data = self.content[first : first + count]
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.breaks:
            self.close_connection = True
            data = data[: self.breaks.pop(0)]
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def disk() -> Iterator[RemoteDisk]:
    Files.content, Files.breaks, Files.asked = CONTENT, [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = BrokerAddress(url=f"http://127.0.0.1:{server.server_port}")
        with closing(RemoteDisk(address, wait_s=0)) as made:
            yield made
        server.shutdown()


def test_a_segment_continues_behind_the_last_byte_that_came_and_is_asked_for_in_small_parts_at_first(
    disk: RemoteDisk,
) -> None:
    Files.breaks = [100_000, 0, 0]
    assert disk.read(SEGMENT, 5, 2 * MIB) == CONTENT[5 : 5 + 2 * MIB]
    firsts, counts = zip(*Files.asked, strict=True)
    least = 65_536
    assert counts[:3] == (2 * MIB, 100_000, least), "no more than came of the last one"
    assert counts[3:6] == (least, 2 * least, 4 * least), "more and more"
    assert firsts[:4] == (5, 100_005, 100_005, 100_005)
    assert sum(counts[3:]) == 2 * MIB - 100_000, "nothing twice"
    Files.asked.clear()
    assert len(disk.read(SEGMENT, 0, 3 * MIB)) == 3 * MIB
    assert len(Files.asked) <= 3, "where nothing breaks, all at once again"


def test_a_file_that_is_replaced_as_a_whole_is_never_put_together_of_two(disk: RemoteDisk) -> None:
    Files.content, Files.breaks = b"old" * 1000, [1000]
    replaced = disk.open(layout.FORMAT)
    asked = Files.asked

    class Replacing(list[tuple[int, int]]):
        def append(self, one: tuple[int, int]) -> None:
            super().append(one)
            if len(self) == 2:
                Files.content = b"new" * 1000

    Files.asked = Replacing(asked)
    assert replaced.read(0, 3000) == b"new" * 1000
    assert Files.asked == [(0, 3000), (0, 3000)]


def test_what_is_behind_the_end_of_a_range_is_not_read_ahead(disk: RemoteDisk) -> None:
    file = disk.open(SEGMENT)
    file.end_at(11 * MIB)
    for first in range(0, 11 * MIB, MIB):
        assert file.read(first, MIB) == CONTENT[first : first + MIB]
    assert Files.asked == [
        (0, MIB),
        (MIB, AHEAD_BYTES),
        (MIB + AHEAD_BYTES, 2 * MIB),
    ]


def test_what_was_read_ahead_is_not_asked_for_again_where_a_read_reaches_behind_it(
    disk: RemoteDisk,
) -> None:
    file = disk.open(SEGMENT)
    read = b"".join(file.read(first, 700_000) for first in range(0, 18_000_000, 700_000))
    assert read == CONTENT[: len(read)]
    firsts = [first for first, _ in Files.asked]
    ends = [first + count for first, count in Files.asked]
    assert firsts[1:] == ends[:-1]


@pytest.mark.parametrize("url", ["nowhere", "ftp://127.0.0.1", "http://shop..broker:9470"])
def test_an_address_that_is_none_is_said_to_be_unusable(url: str) -> None:
    disk = RemoteDisk(BrokerAddress(url=url), wait_s=0)
    with closing(disk), pytest.raises(SourceError, match="Give the address of a broker"):
        disk.names(layout.COMMIT_LOG)
