"""Loopback addresses: hosts that lead to this machine alone, so that clear text stays on it."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host, by address or name, is this machine alone; of names only `localhost` is believed."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
