"""The data directory: the disk port and waiting for it, the names of files, and the small files."""
