"""What Spark from 4.2 on knows of bounds of a micro-batch, with stand-ins for before: then there are none."""

from __future__ import annotations

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark before 4.2
    ReadAllAvailable = ReadMaxBytes = ReadMaxRows = None  # type: ignore[assignment,misc]  # as below

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]  # mypy sees the newer Spark
        """Stands in for what this Spark does not have."""


__all__ = [
    "ReadAllAvailable",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
