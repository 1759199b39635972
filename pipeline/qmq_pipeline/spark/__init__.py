"""The Spark session, its Java, and the translation of Spark's errors."""
