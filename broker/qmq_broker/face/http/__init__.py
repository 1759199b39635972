"""One HTTP request and its answer, read and written within bounds."""
