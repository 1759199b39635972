"""`mask_secrets`: masks passwords in texts that may contain a URL."""

from __future__ import annotations

import re
from typing import Final

#: The replacement of a secret.
MASK: Final = "***"
_AUTHORITY: Final = re.compile(r"(?<=://)([^:/@\s]*):(\S*)@")
_QUERY_SECRET: Final = re.compile(
    r"(?i)([?&][^=&\s]*(?:password|passwd|secret|token)[^=&\s]*=)[^&\s]*"
)


def mask_secrets(text: str) -> str:
    """The text with every password of a URL replaced by `***`."""
    return _QUERY_SECRET.sub(rf"\1{MASK}", _AUTHORITY.sub(rf"\1:{MASK}@", text))
