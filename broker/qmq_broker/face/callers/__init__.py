"""Who asks: callers, their roles, tokens and certificates."""
