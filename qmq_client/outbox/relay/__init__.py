"""The rows of committed transactions, as the publisher and the watchdog own them."""
