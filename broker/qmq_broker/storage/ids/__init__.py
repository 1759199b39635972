"""Message ids that were stored: the window that repeats are recognized by, and how it outlives a restart."""
