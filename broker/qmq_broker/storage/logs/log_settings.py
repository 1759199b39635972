"""The space settings of the two logs of a store."""

from __future__ import annotations

from qmq_broker.options import StoreOptions
from qmq_broker.storage.logs.segmented_log import LogSettings


def log_settings(
    options: StoreOptions, store_id: bytes, epoch: int
) -> tuple[LogSettings, LogSettings]:
    """The settings of the commit log and of the action log."""
    commit = LogSettings(
        store_id=store_id,
        epoch=epoch,
        growth_bytes=options.growth_bytes,
        reserve_bytes=options.reserve_bytes,
        spare_segments=options.spare_segments,
    )
    # Pulls and acks continue below the reserve, because they free space.
    actions = LogSettings(
        store_id=store_id,
        epoch=epoch,
        growth_bytes=min(options.growth_bytes, options.action_segment_bytes),
        reserve_bytes=0,
    )
    return commit, actions
