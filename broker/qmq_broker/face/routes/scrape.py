"""`GET /metrics`: serves the metrics of `metrics.py` in Prometheus' text format.

The loop thread only reads the numbers; another thread formats them, for one scrape at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from qmq_broker.errors import BusyError
from qmq_broker.face.answers import refuse
from qmq_broker.face.routes.metrics import METRICS, HistogramMetric, PlainMetric, Reading
from qmq_broker.service.broker import Broker

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

PREFIX: Final = "qmq_broker_"
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_RETRY_AFTER_S: Final = 1.0


class Scraper:
    """Answers scrapes of one broker; belongs to the loop thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._is_busy = False

    async def scrape(self, _: Request) -> Response:
        """Current values of all metrics, and the metrics of the process."""
        if self._is_busy:
            raise BusyError(
                "1 reading of the metrics is in progress; allowed: 1", retry_after_s=_RETRY_AFTER_S
            )
        self._is_busy = True
        try:
            body = await asyncio.to_thread(text_of, Reading.of(self._broker))
        finally:
            self._is_busy = False
        return Response(body, media_type=_TEXT)


def text_of(reading: Reading) -> bytes:
    """Format a reading as text. Any thread may call it.

    Raises `RequestRefusedError` (501) if prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise refuse(
            501,
            "no_metrics",
            "metrics need prometheus-client, which is not installed",
            remedy='Run pip install "qmq[metrics]" where the broker runs, and restart it.',
        ) from error

    class Read(Collector):
        def collect(self) -> Iterator[Family]:
            return (family(metric, reading) for metric in METRICS)

    registry = CollectorRegistry()
    registry.register(Read())
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def family(metric: PlainMetric | HistogramMetric, reading: Reading) -> Family:
    """One metric with its values."""
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    name = PREFIX + metric.name
    if isinstance(metric, HistogramMetric):
        steps, total = metric.read(reading)
        histogram = HistogramMetricFamily(name, metric.about)
        histogram.add_metric((), [(_bound(bound), count) for bound, count in steps], total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    plain: CounterMetricFamily | GaugeMetricFamily = kind(name, metric.about, labels=metric.labels)
    for row, value in metric.read(reading):
        plain.add_metric(row, value)
    return plain


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
