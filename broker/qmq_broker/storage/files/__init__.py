"""The data directory: the disk port, names of files, and the small ones."""
