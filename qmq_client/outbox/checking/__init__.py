"""Checks that the live tables match this version."""
