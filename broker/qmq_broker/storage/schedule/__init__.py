"""Messages that wait for their due time, by hour."""
