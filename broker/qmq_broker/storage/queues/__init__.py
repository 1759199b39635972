"""Consume queues: where the messages of a subject are in the commit log."""
