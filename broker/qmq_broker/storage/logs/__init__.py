"""Append-only logs in segments: writing, scanning, cutting, searching."""
