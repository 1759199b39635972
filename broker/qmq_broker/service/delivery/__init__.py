"""Who gets which message, and what becomes of it."""
