"""Databases that are configured, for processes that have no engine of their own."""
