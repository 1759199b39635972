"""The key index: messages by id and by key."""
