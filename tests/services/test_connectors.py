"""A connector that cannot be had is said so, with what Spark says."""

from __future__ import annotations

import os

import pytest

from tests.services.connectors import connectors
from tests.services.rungs import RungError


@pytest.mark.timeout(300)
def test_a_connector_that_no_repository_has_is_named_with_the_reason() -> None:
    nowhere = "nowhere"  # no coordinates, so no repository is asked
    with pytest.raises(RungError, match=r"nowhere cannot be fetched: .*Maven Coordinates"):
        connectors([nowhere], os.environ, (4, 0))
