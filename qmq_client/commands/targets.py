"""What `module` or `module:attribute` of a command names: found and imported.

A module that fails is told in one line: the error and where it passed through files that are neither
Python's nor an installed package's. The whole traceback is a log line at debug level.
"""

from __future__ import annotations

import importlib
import logging
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Final

from qmq_client.errors import ConfigurationError, QmqError
from qmq_client.wire.shown import shorten

_LOG: Final = logging.getLogger(__name__)
#: The innermost ones: where it failed, and how that was reached.
_PLACES_MAX: Final = 3
#: Enough for a sentence; errors of some libraries hold a page.
_REASON_CHARACTERS_MAX: Final = 300
_PATHS_OF_PYTHON: Final = ("stdlib", "platstdlib", "purelib", "platlib")


def load_target(target: str) -> object:
    """What `module` or `module:attribute` names; raises `ConfigurationError`.

    The module's own `QmqError` passes unchanged: it says what to do, and the exit code is its own.
    """
    module_name, _, attribute = target.partition(":")
    if module_name.startswith(".") or "/" in module_name or "\\" in module_name:
        name = module_name.replace("\\", "/").rpartition("/")[2].removesuffix(".py").strip(".")
        raise ConfigurationError(
            setting="handlers",
            value=f"{shorten(target)} is a path, not the name of a module",
            remedy=f"Go to the directory that has it and give {name or 'MODULE'}, or a dotted name.",
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # whatever an application may raise
        _LOG.debug("import_failed module=%s", module_name, exc_info=error)
        if isinstance(error, QmqError):
            raise
        raise _not_imported(target, module_name, error) from error
    try:
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
    except AttributeError as error:
        raise ConfigurationError(
            setting="handlers",
            value=f"{shorten(target)} ({shorten(str(error))})",
            remedy=f"Give module:attribute with what module {module_name} has.",
        ) from error
    return found


def _not_imported(target: str, module_name: str, error: Exception) -> ConfigurationError:
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    is_missing_itself = missing is not None and f"{module_name}.".startswith(f"{missing}.")
    places = _places(error)
    if module_name.endswith(".py"):
        value = f"{shorten(target)} is the name of a file"
        remedy = f"Give the module without .py: {module_name.removesuffix('.py')}."
    elif is_missing_itself or not places:
        value = f"{shorten(target)} ({_reason(error)})"
        remedy = "Give module or module:attribute, importable from here."
    elif missing is not None:
        value = f"{shorten(target)} was found, but imports {missing}, which is not there ({places})"
        remedy = f"Install {missing}, or fix the import."
    else:
        value = (
            f"{shorten(target)} was found, but failed at its import: {_reason(error)} ({places})"
        )
        remedy = "Fix it there; --log-level debug shows the whole traceback."
    return ConfigurationError(setting="handlers", value=value, remedy=remedy)


def _reason(error: Exception) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = " ".join(f"{type(error).__name__}: {text}".split())
    return line if len(line) <= _REASON_CHARACTERS_MAX else f"{line[:_REASON_CHARACTERS_MAX]}…"


def _places(error: Exception) -> str:
    """`shop.py:3 > settings.py:9 in load`, outermost first; empty if no code of a module had run."""
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ") and frame.filename != __file__
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno, "<module>"))
    of_python = tuple(f"{sysconfig.get_path(name)}/" for name in _PATHS_OF_PYTHON)
    own = [frame for frame in frames if not frame[0].startswith(of_python)] or frames
    return " > ".join(
        f"{_seen_from_here(filename)}:{line}" + ("" if name == "<module>" else f" in {name}")
        for filename, line, name in own[-_PLACES_MAX:]
    )


def _seen_from_here(filename: str) -> str:
    path = Path(filename)
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
