"""Serve with tight bounds, or on a disk that starts to fail after some syncs; for `BrokerProcess`."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
from pathlib import Path

from qmq_broker.errors import DiskError
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.logs import start_logging
from qmq_broker.face.server import serve
from qmq_broker.options import ServeOptions, StoreOptions, TlsOptions
from qmq_broker.service.limits import ServiceLimits
from qmq_broker.storage.files.disk import OsDisk
from qmq_broker.storage.files.os_file import OsFile
from qmq_client.clock import SYSTEM_CLOCK


class FailingFile(OsFile):
    """A file whose syncs fail once the disk says so."""

    def __init__(self, file: OsFile, disk: FailingDisk) -> None:
        super().__init__(file.path, os.dup(file._descriptor))
        file.close()
        self._disk = disk

    def sync(self) -> None:
        self._disk.count_sync()
        super().sync()


class FailingDisk(OsDisk):
    """Every sync after the first `syncs` of the commit log fails.

    While there is a file `full` next to the data directory, there is no free space for derived files.
    """

    def __init__(self, root: str, syncs: int) -> None:
        super().__init__(root)
        self._syncs_left = syncs

    def open(self, path: str, *, is_new: bool = False) -> OsFile:
        file = super().open(path, is_new=is_new)
        return FailingFile(file, self) if path.startswith("commitlog/") else file

    def free_bytes(self) -> int:
        return 0 if (Path(self.root).parent / "full").exists() else super().free_bytes()

    def count_sync(self) -> None:
        self._syncs_left -= 1
        if self._syncs_left < 0:
            raise DiskError(operation="sync", path="commitlog", reason="planted fault")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--syncs", type=int, default=10**9)
    parser.add_argument("--head-ms", type=int, default=300)
    parser.add_argument("--request-ms", type=int, default=600)
    parser.add_argument("--unread-ms", type=int, default=600)
    parser.add_argument("--connections", type=int, default=5)
    parser.add_argument("--connections-per-address", type=int, default=5)
    parser.add_argument("--files", type=int)
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--tls-cert", default="")
    parser.add_argument("--tls-key", default="")
    given = parser.parse_args()
    if given.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (given.files, given.files))
    limits = [one.split("=") for one in given.limit]
    host, _, port = given.listen.partition(":")
    start_logging(logging.INFO)
    return serve(
        ServeOptions(
            directory=given.data,
            host=host,
            port=int(port),
            tls=TlsOptions(certificate_file=given.tls_cert, key_file=given.tls_key)
            if given.tls_cert
            else None,
            store=StoreOptions(reserve_bytes=0),
        ),
        SYSTEM_CLOCK,
        disk=FailingDisk(given.data, given.syncs),
        limits=ServiceLimits(**{name: int(number) for name, number in limits}),
        face_limits=FaceLimits(
            head_ms=given.head_ms,
            request_ms=given.request_ms,
            unread_ms=given.unread_ms,
            connections=given.connections,
            connections_per_address=given.connections_per_address,
            sweep_ms=50,
        ),
    )


if __name__ == "__main__":
    sys.exit(main())
