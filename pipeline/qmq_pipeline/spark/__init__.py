"""The session, the Java under it, and Spark's errors in our words."""
