"""Which call makes bytes durable, by what a system has."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from qmq_broker.storage.files.disk import choose_syncs


def test_B1_data_is_synced_without_times_and_names_with_everything() -> None:
    assert choose_syncs(None, os.fdatasync, os.fsync) == (os.fdatasync, os.fsync)


def test_B1_without_a_call_for_data_everything_is_synced() -> None:
    assert choose_syncs(None, None, os.fsync) == (os.fsync, os.fsync)


def test_B1_where_a_sync_leaves_the_drives_cache_alone_the_full_one_is_called(
    tmp_path: Path,
) -> None:
    # F_GETFD stands for the command of macOS: it shows that `fcntl` is called with it.
    for sync in choose_syncs(fcntl.F_GETFD, os.fdatasync, os.fsync):
        descriptor = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
        assert sync(descriptor) == fcntl.FD_CLOEXEC
        os.close(descriptor)
