"""Authentication and authorization: callers, their roles, tokens and certificates."""
