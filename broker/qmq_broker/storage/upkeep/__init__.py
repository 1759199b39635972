"""What an operator does with a data directory: verify, dump, rebuild, back up, give up."""
