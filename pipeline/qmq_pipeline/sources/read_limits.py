"""The classes by which Spark limits micro-batches, from 4.2 on; stand-ins without limits for older versions."""

from __future__ import annotations

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark before 4.2
    ReadAllAvailable = ReadMaxBytes = None  # type: ignore[assignment,misc]  # as below

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # mypy sees the newer Spark
        """Stands in for a class that this Spark does not have."""


__all__ = [
    "ReadAllAvailable",
    "ReadMaxBytes",
    "SupportsTriggerAvailableNow",
]
