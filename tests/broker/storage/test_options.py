from __future__ import annotations

import pytest

from qmq_broker.options import GIB, MIB, SEGMENT_BYTES, ServeOptions, StoreOptions
from qmq_broker.service.limits import ServiceLimits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("segment_bytes", -512),
        ("segment_bytes", 512),
        ("segment_bytes", 1000),
        ("segment_bytes", 2**60),
        ("growth_bytes", 100),
        ("growth_bytes", 513),
        ("queue_entries_per_file", 0),
        ("dedupe_ids", -1),
        ("dedupe_ms", -1),
        ("reserve_bytes", -1),
        ("checkpoint_ms", 0),
        ("open_files", 0),
    ],
)
def test_a_setting_outside_its_bounds_is_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        StoreOptions(**{field: value})  # type: ignore[arg-type]  # any one setting


@pytest.mark.parametrize(
    ("field", "value"), [("directory", ""), ("port", 65_536), ("port", -1), ("drain_ms", -1)]
)
def test_a_wrong_place_to_serve_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        ServeOptions(**{"directory": "d", field: value})  # type: ignore[arg-type]  # any one setting


def test_a_segment_must_hold_the_longest_frame() -> None:
    with pytest.raises(ValueError, match="segment_bytes"):
        ServeOptions(directory="d", store=StoreOptions(segment_bytes=8 * MIB))
    ServeOptions(directory="d", store=StoreOptions(segment_bytes=9 * MIB))


def test_the_defaults_are_those_that_were_decided() -> None:
    options = StoreOptions()
    assert (options.segment_bytes, SEGMENT_BYTES) == (0, GIB)
    assert (options.queue_entries_per_file, options.index_entries) == (300_000, 2_000_000)
    assert (options.checkpoint_ms, options.checkpoint_bytes) == (1_000, 64 * MIB)
    assert (options.dedupe_ms, options.dedupe_ids) == (600_000, 1_000_000)
    assert (options.retain_ms, options.retain_bytes) == (72 * 3_600_000, 0)
    assert (options.force_retention, options.reserve_bytes) == (False, 256 * MIB)
    limits = ServiceLimits()
    assert (limits.commit_queue_age_ms, limits.commit_queue_bytes) == (1_000, 64 * MIB)
