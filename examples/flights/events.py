"""What the demo's services write into the history alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.kit.history import body_hash


def fingerprint(body: Mapping[str, Any], key: str | None) -> str:
    """Hash of what the handler must see, independent of the product's encoding and checksums."""
    return body_hash(json.dumps([body, key], sort_keys=True).encode())
