"""Spark's data sources `qmq` and `qmq_outbox`; `register` makes them known to a session."""
