"""What the tests of the face share."""

from __future__ import annotations

import pytest

from tests.broker.face.asgi import Client
from tests.broker.service.rig import Rig


@pytest.fixture
def client(rig: Rig) -> Client:
    """Asks the face without a socket."""
    return Client(rig)
