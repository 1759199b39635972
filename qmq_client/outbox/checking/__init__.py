"""Checks that the live tables are those that this version works with."""
