"""What became of each message, folded from actions."""
