"""Rows of committed transactions, as the publisher and the watchdog take, settle and look after them."""
