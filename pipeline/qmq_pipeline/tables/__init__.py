"""Tables in a folder: their columns, their files, and the commits that make files a table."""
