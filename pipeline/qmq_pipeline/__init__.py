"""The pipeline: the broker's files and the outbox tables as Spark tables, and the proof that nothing was lost.

Public names are imported from their modules: `qmq_pipeline.sources.register`, `qmq_pipeline.jobs.*`.
"""
