"""The places that logs are read from: a directory, a backup, an archive, a broker; with options."""
