"""Decodes logs and outboxes into columns of rows."""
