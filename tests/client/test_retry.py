from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from qmq_client.errors import ConfigurationError
from qmq_client.retry import AFTER_MAX, Backoff, Breaker, Reject, Retry


def test_waits_double_up_to_the_cap() -> None:
    backoff = Backoff(first_ms=100, factor=2.0, max_ms=1_000, jitter=0.0)
    waits = [backoff.delay_ms(attempt, 0.5) for attempt in (1, 2, 3, 4, 5, 1_000_000)]
    assert waits == [100, 200, 400, 800, 1_000, 1_000]


def test_jitter_only_shortens_a_wait() -> None:
    backoff = Backoff(first_ms=1_000, jitter=0.2)
    assert backoff.delay_ms(1, 0.0) == 1_000
    assert 800 <= backoff.delay_ms(1, 0.999) < 802


@pytest.mark.parametrize(
    "settings",
    [
        {"first_ms": -1},
        {"first_ms": 10, "max_ms": 5},
        {"first_ms": 0.5},
        {"max_ms": "600000"},
        {"factor": 0.5},
        {"factor": 101},
        {"factor": math.nan},
        {"factor": "2"},
        {"jitter": 1.1},
        {"jitter": None},
    ],
    ids=str,
)
def test_a_backoff_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"Backoff .*{next(iter(settings))}"):
        Backoff(**settings)


def test_the_breaker_opens_after_failures_in_a_row_and_closes_on_success() -> None:
    breaker = Breaker(failures_max=3, first_ms=1_000, wait_ms_max=3_000)
    for _ in range(2):
        breaker.on_failure(0.0)
    breaker.on_success()
    for _ in range(2):
        breaker.on_failure(0.0)
    assert breaker.allows(0.0)
    breaker.on_failure(0.0)
    assert breaker.is_open
    assert (breaker.allows(0.9), breaker.allows(1.0)) == (False, True)
    breaker.on_failure(1.0)
    assert (breaker.allows(2.9), breaker.allows(3.0)) == (False, True)
    breaker.on_failure(3.0)
    assert (breaker.allows(5.9), breaker.allows(6.0)) == (False, True)
    breaker.on_success()
    assert breaker.allows(6.0)
    assert not breaker.is_open


def test_a_service_that_asks_for_time_gets_it_at_once() -> None:
    breaker = Breaker(failures_max=3, first_ms=1_000, wait_ms_max=3_000)
    breaker.on_failure(0.0, at_least_s=10.0)
    assert (breaker.allows(9.9), breaker.allows(10.0)) == (False, True)


def test_retry_and_reject_carry_their_arguments() -> None:
    assert Retry().after_ms is None
    assert Retry(after=1.5).after_ms == 1_500
    assert Retry(after=timedelta(minutes=1)).after_ms == 60_000
    assert Reject("no such customer").reason == "no such customer"
    assert Retry(after=AFTER_MAX).after_ms == 2 * 366 * 24 * 3_600_000
    for wrong in (-1, math.inf, math.nan, 1e12, "5", timedelta(days=2 * 366 + 1)):
        with pytest.raises(ConfigurationError, match="after"):
            Retry(after=wrong)  # type: ignore[arg-type]  # the mistakes
