"""The test kit: the history of a run and the checker that judges it. Free of pytest on purpose."""
