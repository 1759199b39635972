"""Where logs are read from: a directory, a backup, an archive, a running broker; and the options that say so."""
