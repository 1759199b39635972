"""From `send` to COMMIT: the application's transactions, and the messages in each."""
