"""Which files have tests that ask for Spark, known without importing them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_SPARK = re.compile(r"\bspark: SparkSession\b")


@cache
def asks_for_spark(file: Path) -> bool:
    """Whether something in this file takes the session that all tests of one worker share."""
    return bool(_SPARK.search(file.read_text(encoding="utf-8")))
