"""Brings committed rows to the broker, for a producer and for the watchdog that stands in for one."""
