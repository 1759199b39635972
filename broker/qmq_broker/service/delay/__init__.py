"""Delayed messages: released when they are due, asked for, changed."""
