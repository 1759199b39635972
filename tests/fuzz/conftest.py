"""More examples before a release, by the option that all tests know."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before `mutation.py` is imported, which takes its settings from here."""
    if config.getoption("--release"):
        os.environ["QMQ_FUZZ_RELEASE"] = "1"
