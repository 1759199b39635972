"""Spark's data sources `qmq` and `qmq_outbox`; `register` registers them in a session."""
