"""Which hosts lead nowhere but to this machine: what is sent there in the clear, no other machine reads."""

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
