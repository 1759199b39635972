"""Who is calling: callers, their roles, tokens and certificates."""
