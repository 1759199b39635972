"""Tables in a folder: their columns, files, and commits."""
