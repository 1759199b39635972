"""Exit codes of the broker's process, for supervisors."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `broker serve`."""

    #: Stopped on request, everything synced, the clean mark written.
    OK = 0
    #: Stopped, but not in time or not in order; the next start verifies the log's tail.
    UNCLEAN = 1
    #: The command line makes no sense (click's own code), or too few files may be open.
    USAGE = 2
    #: The data directory is in use, or was written by another version or with other settings.
    DIRECTORY = 3
    #: Accepted data is damaged; nothing was changed. A person has to look.
    CORRUPTION = 4
    #: A write or sync failed while serving; restart after looking at the disk.
    POISONED = 5
    #: The address is in use or cannot be bound.
    ADDRESS = 6
