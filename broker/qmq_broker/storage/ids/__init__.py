"""The dedupe window: message ids by which repeats are recognized, and their journal."""
