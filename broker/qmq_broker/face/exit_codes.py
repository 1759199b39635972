"""Exit codes of the broker's process, for supervisors."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `broker serve`."""

    #: Stopped on request, everything synced, the clean mark written.
    OK = 0
    #: Stopped late or uncleanly; the next start verifies the log's tail.
    UNCLEAN = 1
    #: The command line is invalid (click's own code), or too few files may be open.
    USAGE = 2
    #: The data directory is in use, or was written by another version or with other settings.
    DIRECTORY = 3
    #: Accepted data is damaged; nothing was changed. An operator must decide.
    CORRUPTION = 4
    #: A write or sync failed while serving; check the disk, then restart.
    POISONED = 5
    #: The address is in use or cannot be bound.
    ADDRESS = 6
