"""Extracts the cause of an error from the output of the JVM.

A pipeline error that is raised in a worker returns as nested text: Python's traceback in Spark's
message in the JVM's stack. The last line of that traceback has the class and text of the error.
"""

from __future__ import annotations

import re
from traceback import walk_tb
from typing import Final

from qmq_client.wire.errors import QmqError
from qmq_pipeline import errors
from qmq_pipeline.errors import FILE_REMEDY, PipelineError, carried
from qmq_pipeline.tables.damage import damage_in_error

_OURS: Final = re.compile(r"(?:qmq_[a-z_.]+)\.(\w+Error): (.+)")
_PYTHON: Final = re.compile(
    r"^(?:[\w.]+\.)?(\w+(?:Error|Exception|Interrupt)): (.+)$", re.MULTILINE
)
_BRIDGE: Final = "An error occurred while calling "
_SPARK: Final = re.compile(r"^\s*(\[[A-Z0-9_.]+\] .+)$", re.MULTILINE)


def explain(error: BaseException, log: str) -> QmqError:
    """The pipeline error inside this error, or a new one with the message of Spark or the system in one line.

    `log`: the file with the details; the text names it if it has any.
    """
    if isinstance(error, QmqError):
        return error
    text = str(error)
    found = _OURS.findall(text)
    if found:
        name, words = found[-1]
        return carried(name if hasattr(errors, name) else PipelineError.__name__, words.strip())
    if _is_of_lost_jvm(error):
        return PipelineError(
            "Spark's JVM ended in the middle of its work; maybe memory was short. Run the job again: "
            f"it continues from its last commit. The JVM's output is in {log}."
        )
    if (of_file := damage_in_error(text, log)) is not None:
        return of_file
    if not _is_of_spark(error, text):
        return _of_this_process(error, log)
    lines = _PYTHON.findall(text)
    said = f"{lines[-1][0]}: {lines[-1][1]}" if lines else _first(text) or type(error).__name__
    said = said.strip()[:500].rstrip(".")
    return PipelineError(f"Spark failed: {said}. Details are in {log}.")


def _is_of_lost_jvm(error: BaseException) -> bool:
    """Whether the bridge to the JVM could not reach the process, or lost it."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if not frames or not frames[-1].f_globals["__name__"].startswith("py4j."):
        return False
    name, has_answer = type(error).__name__, "Trace:" in str(error)
    is_cut_off = name == "Py4JNetworkError" or (name == "Py4JError" and not has_answer)
    return isinstance(error, OSError) or is_cut_off


def _is_of_spark(error: BaseException, text: str) -> bool:
    package = type(error).__module__.partition(".")[0]
    return package in ("pyspark", "py4j") or _BRIDGE in text or "\n\tat " in text


def _of_this_process(error: BaseException, log: str) -> PipelineError:
    """An error without a part of the JVM: mostly about files."""
    said = (_first(str(error)) or type(error).__name__).strip()[:500].rstrip(".")
    if isinstance(error, OSError):
        return PipelineError(f"{said}. {FILE_REMEDY}")
    return PipelineError(f"unexpected {type(error).__name__}: {said}. The traceback is in {log}.")


def _first(text: str) -> str:
    found = _SPARK.search(text)
    # The bridge to the JVM names its own call first; the exception follows a colon.
    lines = [line.lstrip(": ") for line in text.splitlines() if line.strip(": ")]
    if len(lines) > 1 and lines[0].startswith(_BRIDGE):
        lines = lines[1:]
    return found[1] if found else (lines[0] if lines else "")
