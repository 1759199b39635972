"""System calls of a process: seen, or made to fail, by the program strace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import require_program

#: Everything that changes files, names or what is durable.
CHANGING = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,sync_file_range,msync,"
    "ftruncate,truncate,fallocate,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "link,linkat,symlink,symlinkat,copy_file_range,sendfile,splice,mmap"
)
#: System call → call of the disk port.
_CALLS = {
    "write": "write",
    "pwrite64": "write",
    "writev": "write",
    "pwritev": "write",
    "pwritev2": "write",
    "fsync": "sync",
    "fdatasync": "sync",
    "ftruncate": "truncate",
    "truncate": "truncate by name",
    "fallocate": "allocate",
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "make directory",
    "mkdirat": "make directory",
}
#: Calls that are told names; all others are told descriptors, and what is quoted is content.
_BY_NAME = {"rename", "unlink", "make directory", "link", "linkat", "symlink", "symlinkat", "rmdir"}
_LINE = re.compile(r"^(?:[0-9]+ +)?(?P<call>[a-z0-9_]+)\((?P<rest>.*)$")
_DESCRIPTOR = re.compile(r"^(?:[0-9]+|AT_FDCWD)<(?P<path>[^>]*)>")
_NAME = re.compile(r'"(?P<name>(?:[^"\\]|\\.)*)"')


def traced(output: Path) -> list[str]:
    """What to put before a command to write down all its changing system calls."""
    common = [require_program("strace", "strace"), "-f", "-qq", "-y", "-s", "300", "--seccomp-bpf"]
    return [*common, "-e", f"trace={CHANGING}", "-o", str(output)]


def counted(output: Path) -> list[str]:
    """The same to write down every system call but those that wait for locks."""
    program = require_program("strace", "strace")
    return [
        program,
        "-f",
        "-qq",
        "-s",
        "0",
        "--seccomp-bpf",
        "-e",
        "trace=!futex",
        "-o",
        str(output),
    ]


def counts(output: Path) -> Counter[str]:
    """How often each system call was begun."""
    found = (_LINE.match(line) for line in output.read_text(errors="replace").splitlines())
    return Counter(line["call"] for line in found if line is not None)


def failing(output: Path, call: str, error: str, number: int) -> list[str]:
    """The same to let the n-th call of this kind, in any thread, fail."""
    common = [
        require_program("strace", "strace"),
        "-f",
        "-qq",
        "-y",
        "--seccomp-bpf",
        "-e",
        f"trace={call}",
    ]
    return [*common, "-e", f"inject={call}:error={error}:when={number}", "-o", str(output)]


def changes(output: Path, directory: Path) -> Counter[tuple[str, str]]:
    """How often which call of the port would explain what was traced below a directory."""
    found: Counter[tuple[str, str]] = Counter()
    for line in joined(output.read_text(errors="replace").splitlines()):
        change = _change(line, f"{directory}/")
        if change is not None:
            found[change] += 1
    return found


def joined(lines: Sequence[str]) -> list[str]:
    """Calls that another thread interrupted, in one line each."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        thread = line.partition(" ")[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
        elif " resumed>" in line:
            whole.append(begun.pop(thread, "") + line.partition(" resumed>")[2])
        else:
            whole.append(line)
    return whole


def _change(line: str, below: str) -> tuple[str, str] | None:
    found = _LINE.match(line)
    if found is None or " = -1 " in line:
        return None
    call, rest = found["call"], found["rest"]
    if call in ("openat", "open", "creat"):
        return _opened(call, rest, below)
    if call == "mmap":
        is_shared = "PROT_WRITE" in rest and "MAP_SHARED" in rest
        return ("map for writing", rest) if is_shared and below in rest else None
    named = _paths(rest) if _CALLS.get(call, call) in _BY_NAME else _paths(rest.partition(",")[0])
    paths = [path for path in named if f"{path}/".startswith(below)]
    if not paths:
        return None
    # A new name stands behind the old one.
    return _CALLS.get(call, call), paths[-1].removeprefix(below).removeprefix(below.rstrip("/"))


def _opened(call: str, rest: str, below: str) -> tuple[str, str] | None:
    path = _paths(rest)[0] if _paths(rest) else ""
    changes_something = call == "creat" or "O_CREAT" in rest or "O_TRUNC" in rest
    if not path.startswith(below) or not changes_something:
        return None
    return "make", path.removeprefix(below)


def _paths(rest: str) -> list[str]:
    """Every path that the arguments name: of descriptors alone, or of names in directories."""
    paths = []
    directory = _DESCRIPTOR.match(rest)
    names = list(_NAME.finditer(rest))
    if directory is not None and not rest[directory.end() :].startswith(', "'):
        return [directory["path"]]
    at = [found["path"] for found in re.finditer(r"(?:[0-9]+|AT_FDCWD)<(?P<path>[^>]*)>", rest)]
    for number, name in enumerate(names):
        base = at[min(number, len(at) - 1)] if at else ""
        paths.append(name["name"] if name["name"].startswith("/") else f"{base}/{name['name']}")
    return paths
