"""Consume queues: where the messages of a subject stand in the commit log."""
