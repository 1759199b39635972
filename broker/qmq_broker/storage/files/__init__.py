"""The data directory: the disk port, the names of files, and the small files."""
