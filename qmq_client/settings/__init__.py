"""Settings of a process, from the file, the environment and the command line."""
