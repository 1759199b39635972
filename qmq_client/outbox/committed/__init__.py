"""Claims, settles and maintains rows of committed transactions, for the publisher and the watchdog."""
