"""The report page: its content, charts and HTML. Does not use Spark."""
