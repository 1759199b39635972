"""Bytes of logs and outboxes as columns of rows."""
