"""The report as a page: what it shows, its charts, and the HTML. Knows nothing of Spark."""
