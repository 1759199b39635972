"""An operator's work on a data directory: verify, dump, rebuild, back up, quarantine."""
