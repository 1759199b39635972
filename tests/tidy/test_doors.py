"""Files have one door and time has one door.

Crash tests and simulations replace these doors; whatever goes round them is not tested.
"""

from __future__ import annotations

import ast

from tests.tidy.house import Source, product

#: The data directory: its names, and its open files.
DISK = "broker/qmq_broker/storage/files/disk.py"
OPEN_FILES = "broker/qmq_broker/storage/files/os_file.py"
#: Tokens and certificates: the operator's, outside of the data directory.
OUTSIDE = "broker/qmq_broker/face/authentication/outside_files.py"

#: What of `os` reaches a file. The rest (`environ`, `getpid`, `path`, `urandom`) is harmless.
OS_FILE_CALLS = {
    "open", "close", "read", "write", "pread", "preadv", "pwrite", "pwritev", "readv", "writev",
    "fsync", "fdatasync", "sync", "truncate", "ftruncate", "posix_fallocate", "posix_fadvise",
    "rename", "renames", "replace", "link", "symlink", "unlink", "remove", "removedirs", "rmdir",
    "mkdir", "makedirs", "listdir", "scandir", "walk", "stat", "fstat", "lstat", "statvfs",
    "sendfile", "copy_file_range", "utime", "chmod", "access", "dup", "fdopen", "lseek",
}  # fmt: skip
FILE_MODULES = {"fcntl", "glob", "io", "mmap", "shutil", "tempfile"}
#: Methods that only `pathlib.Path` has, so that they can be told without knowing the type.
PATH_CALLS = {"read_bytes", "read_text", "write_bytes", "write_text", "iterdir", "rglob", "touch"}
CLOCK_CALLS = {"now", "utcnow", "today"}


def file_doors(source: Source) -> list[str]:
    """Return each place where the source reaches a file by itself."""
    faults = []
    for node in ast.walk(source.tree):
        if what := file_access(node):
            faults.append(f"{source.path}:{getattr(node, 'lineno', 0)} {what}")
    return faults


def file_access(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id="open")):
            return "open()"
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OS_FILE_CALLS:
            return f"os.{name}"
        case ast.Call(func=ast.Attribute(attr=name)) if name in PATH_CALLS:
            return f".{name}()"
        case ast.Import(names=names):
            found = {alias.name for alias in names} & FILE_MODULES
        case ast.ImportFrom(module="os", names=names):
            found = {alias.name for alias in names} & OS_FILE_CALLS
        case ast.ImportFrom(module="io", names=[ast.alias(name="BytesIO" | "StringIO")]):
            return None  # memory
        case ast.ImportFrom(module=str(module)):
            found = {module} & FILE_MODULES
        case _:
            return None
    return f"import {min(found)}" if found else None


def clock_doors(source: Source) -> list[str]:
    """Return each place where the source asks the machine for the time or sleeps."""
    faults = []
    for node in ast.walk(source.tree):
        if what := clock_access(node):
            faults.append(f"{source.path}:{getattr(node, 'lineno', 0)} {what}")
    return faults


def clock_access(node: ast.AST) -> str | None:
    match node:
        case ast.Import(names=names) if any(alias.name == "time" for alias in names):
            return "import time"
        case ast.ImportFrom(module="time"):
            return "from time import"
        case ast.Attribute(value=ast.Name(id="datetime" | "date"), attr=name):
            return f"datetime.{name}" if name in CLOCK_CALLS else None
        case ast.Attribute(value=ast.Attribute(attr="datetime" | "date"), attr=name):
            return f"datetime.{name}" if name in CLOCK_CALLS else None
    return None


def test_only_disk_py_touches_files_in_the_broker() -> None:
    doors = (DISK, OPEN_FILES, OUTSIDE)
    sources = [source for source in product("qmq_broker") if source.path not in doors]
    assert sources
    assert [fault for source in sources for fault in file_doors(source)] == []


def test_only_clock_py_touches_time() -> None:
    sources = [source for source in product() if source.name != "clock.py"]
    assert sources
    assert [fault for source in sources for fault in clock_doors(source)] == []


def test_planted_file_access_is_found() -> None:
    lines = [
        "open('x')",
        "os.pwrite(1, b'', 0)",
        "from os import fsync",
        "import mmap",
        "from fcntl import flock",
        "path.read_bytes()",
        "f = os.unlink",
    ]
    for line in lines:
        assert file_doors(Source(path="a.py", text=line)), line
    for line in ["disk.open('x')", "os.getpid()", "disk.unlink(a)", "from os import environ"]:
        assert not file_doors(Source(path="a.py", text=line)), line


def test_planted_clock_access_is_found() -> None:
    lines = [
        "import time",
        "from time import monotonic",
        "datetime.now()",
        "datetime.datetime.utcnow()",
        "now = datetime.date.today",
    ]
    for line in lines:
        assert clock_doors(Source(path="a.py", text=line)), line
    for line in ["clock.now_ms()", "datetime.fromtimestamp(0)", "from datetime import time"]:
        assert not clock_doors(Source(path="a.py", text=line)), line
