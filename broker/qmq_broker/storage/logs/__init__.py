"""Append-only logs in segments: written, scanned, cut, looked through."""
