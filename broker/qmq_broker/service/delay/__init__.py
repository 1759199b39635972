"""Delayed messages: releasing them when they are due, querying and changing them."""
