"""Delivery: the selection, leases and settlement of messages for consumers."""
