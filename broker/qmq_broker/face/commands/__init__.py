"""`qmq broker` and `qmq store`."""
