"""The dedupe window: the message ids by which repeats are recognized, and how it survives a
restart.
"""
