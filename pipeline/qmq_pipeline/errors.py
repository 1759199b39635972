"""The errors of the pipeline.

::

    QmqError                        `qmq_client.wire.errors`
    └── PipelineError               the job cannot continue; has the reason and the remedy
        ├── OptionError             an option or argument is not known or not possible
        ├── SourceError             the source does not exist, or cannot be reached
        │   ├── UnreachableError    the source does not answer; the same call may work later
        │   ├── ExpiredRangeError   retention has deleted the range
        │   ├── LaterVersionError   a later version of qmq wrote it
        │   ├── DamagedRangeError   accepted data is damaged
        │   └── QuarantinedRangeError  the broker has the range in quarantine
        ├── IncompleteError         rows are missing between the first and the last one
        ├── TablesError             the folder of the tables cannot be used
        │   └── TablesInUseError    another run writes them; the same call may work later
        └── JavaError               no Java that Spark can run on

Workers send them to the driver as text, so the text is complete.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Final

from qmq_client.wire.errors import QmqError

#: The remedy if the system refuses a file.
FILE_REMEDY: Final = "Check that it is there, may be written, and has room."


class PipelineError(QmqError):
    """The pipeline cannot continue."""

    code = "pipeline"


@dataclass(kw_only=True, eq=False, repr=False)
class OptionError(PipelineError):
    """An option is not known, or its value is not possible."""

    option: str
    allowed: str

    code = "option"
    text = "option {option}: {value}; allowed: {allowed}. {remedy}"


@dataclass(kw_only=True, eq=False, repr=False)
class SourceError(PipelineError):
    """The source does not exist, is of another version, or cannot be reached."""

    source: str
    reason: str

    code = "source"
    text = "{source}: {reason}. {remedy}"


class UnreachableError(SourceError):
    """The source does not answer; the same call may work later."""

    code = "unreachable"


class ExpiredRangeError(SourceError):
    """Retention has deleted the requested range."""

    code = "expired_range"


@dataclass(kw_only=True, eq=False, repr=False)
class LaterVersionError(SourceError):
    """A later version of qmq wrote the data; it is intact, and no part of it was returned."""

    remedy: str = "Use that version here, too"

    code = "later_version"

    def __post_init__(self) -> None:
        self.reason = self.reason.rstrip(".")
        super().__post_init__()


class DamagedRangeError(SourceError):
    """Accepted data is damaged; no part of the range was returned."""

    code = "damaged_range"


class QuarantinedRangeError(SourceError):
    """The broker has a damaged part of the range in quarantine; no rows after it were returned."""

    code = "quarantined_range"


@dataclass(kw_only=True, eq=False, repr=False)
class IncompleteError(PipelineError):
    """Sequences of a subject are missing, and no quarantined range explains it."""

    subject: str
    first_sequence: int
    last_sequence: int

    code = "incomplete"
    text = (
        "{subject}: sequences {first_sequence} to {last_sequence} are missing between what "
        "was read before and after them. Run `qmq store verify` on the data directory."
    )


@dataclass(kw_only=True, eq=False, repr=False)
class TablesError(PipelineError):
    """The folder of the tables cannot be used."""

    path: str
    reason: str

    code = "tables"
    text = "{path}: {reason}. {remedy}"


class TablesInUseError(TablesError):
    """Another run writes the tables; the same call may work later."""

    code = "tables_in_use"


class JavaError(PipelineError):
    """Spark cannot run here: there is no Java for it, or its user has no name."""

    code = "java"


def _is_of_files(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, OSError)


def carried(name: str, text: str) -> PipelineError:
    """Restore the error that a worker sent as class name and text; of the same class if it is one of these.

    Its fields stayed in the worker. For any other class, the text begins with its name.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, PipelineError)):
        remedy = f". {FILE_REMEDY}" if _is_of_files(name) else ""
        return PipelineError(f"a worker failed: {name}: {text}{remedy}")
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error
