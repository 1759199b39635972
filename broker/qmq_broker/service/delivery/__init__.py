"""Delivery: who gets which message, and what becomes of it."""
