"""What can be asked: the hot routes, and those of people and tools."""
