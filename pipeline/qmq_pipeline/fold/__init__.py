"""The fold of actions into the outcome of each message."""
