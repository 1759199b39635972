"""The errors of the pipeline.

::

    QmqError                        `qmq_client.wire.errors`
    └── PipelineError               the job cannot continue; says what and what to do
        ├── OptionError             an option or argument is not known or not possible
        ├── SourceError             what is to be read is not there, or cannot be reached
        │   ├── UnreachableError    no answer from there; the same call may work later
        │   ├── ExpiredRangeError   retention has passed the range
        │   ├── LaterVersionError   a later version of qmq wrote it
        │   ├── DamagedRangeError   accepted data is not as it was written
        │   └── QuarantinedRangeError  it was damaged, and the broker gave it up
        ├── IncompleteError         rows are missing between the first and the last one
        ├── TablesError             the folder of the tables cannot be used
        │   └── TablesInUseError    another run writes them; the same call may work later
        └── JavaError               no Java that Spark can run on

They travel from workers to the driver as text, so the text says everything.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Final

from qmq_client.wire.errors import QmqError

#: What to do when the system refuses a file.
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
    """What is to be read is not there, is of another version, or cannot be reached."""

    source: str
    reason: str

    code = "source"
    text = "{source}: {reason}. {remedy}"


class UnreachableError(SourceError):
    """No answer from there; the same call may work later."""

    code = "unreachable"


class ExpiredRangeError(SourceError):
    """Retention has deleted what was asked for."""

    code = "expired_range"


@dataclass(kw_only=True, eq=False, repr=False)
class LaterVersionError(SourceError):
    """A later version of qmq wrote what is to be read; it is whole, and nothing of it was returned."""

    remedy: str = "Use that version here, too"

    code = "later_version"

    def __post_init__(self) -> None:
        self.reason = self.reason.rstrip(".")
        super().__post_init__()


class DamagedRangeError(SourceError):
    """Accepted data is not as it was written; nothing of the range was returned."""

    code = "damaged_range"


class QuarantinedRangeError(SourceError):
    """The broker has given up a damaged part of the range; nothing after it was returned."""

    code = "quarantined_range"


@dataclass(kw_only=True, eq=False, repr=False)
class IncompleteError(PipelineError):
    """Sequences of a subject are missing, and no quarantined range says why."""

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
    """The error that a worker sent as the name of its class and its text; of the same class if that is one of these.

    Its fields stayed in the worker. For any other class, the text begins with its name.
    """
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, PipelineError)):
        remedy = f". {FILE_REMEDY}" if _is_of_files(name) else ""
        return PipelineError(f"a worker failed: {name}: {text}{remedy}")
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error
