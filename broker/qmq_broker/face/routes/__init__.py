"""The routes: hot ones, and those for people and tools."""
