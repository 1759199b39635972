"""Compiles the modules that turn messages into bytes and back, while a wheel is built.

They are compiled by Cython as they stand, with the types of the `.pxd` beside each. The wheel has the Python
too, which runs wherever the compiled modules do not fit. `QMQ_BUILD_KERNEL` says whether: 0 never; 1 always,
and the build fails if that is impossible; otherwise if the Python is one of `TRIED` and a C compiler and the
Python's headers are there.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES: Final = ("qmq_client.wire.record", "qmq_client.message")
#: Versions of CPython under which the tests have run with the compiled modules.
TRIED: Final = ((3, 11), (3, 12), (3, 13))
#: Arguments are checked by the code itself, whose errors say more than Cython's.
DIRECTIVES: Final = {"language_level": 3, "annotation_typing": False}
COMPILER_OPTIONS: Final = ["-O2", "-g0"]


class KernelHook(BuildHookInterface):  # type: ignore[misc]  # hatchling is not where types are checked
    """The hook that pyproject.toml names."""

    def dependencies(self) -> list[str]:
        """What a build needs beside hatchling."""
        return ["cython>=3.1,<4", "setuptools>=69"] if is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled modules to a wheel, which then fits one Python on one platform."""
        if version == "editable" or not is_wanted():
            return
        self._folder = tempfile.mkdtemp()
        try:
            made = compile_modules(Path(self.root), Path(self._folder))
        except Exception as error:  # of Cython, setuptools or the compiler
            if is_demanded():
                raise
            self.app.display_warning(f"qmq is built without compiled modules: {error}")
            return
        build_data["force_include"].update(made)
        build_data.update(pure_python=False, infer_tag=True)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled."""
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


def is_demanded() -> bool:
    """Whether a build without compiled modules has failed."""
    return os.environ.get("QMQ_BUILD_KERNEL") == "1"


def is_wanted() -> bool:
    """Whether the modules are to be compiled."""
    if said := os.environ.get("QMQ_BUILD_KERNEL"):
        return said == "1"
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in TRIED:
        return False
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return shutil.which(compiler) is not None and headers.exists()


def compile_modules(root: Path, folder: Path) -> dict[str, str]:
    """Each compiled module, and its place in the wheel."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    sources = {name: f"{name.replace('.', '/')}.py" for name in MODULES}
    before = Path.cwd()
    os.chdir(root)
    try:
        extensions = cythonize(
            [
                Extension(name, [source], extra_compile_args=COMPILER_OPTIONS)
                for name, source in sources.items()
            ],
            build_dir=str(folder / "c"),
            compiler_directives=DIRECTIVES,
            quiet=True,
        )
        command = build_ext(Distribution({"ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder / "made"), str(folder / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    made = [Path(path) for path in command.get_outputs()]
    return {str(path): path.relative_to(folder / "made").as_posix() for path in made}
