"""The dedupe window: message ids that tell repeats, and how they survive a restart."""
