"""Commands of the pipeline one after the other in one process, with one session of Spark, as a notebook has them.

Run as a program: each line of its input is a JSON list, either the words of a command, or `sql` and a query; each line
that it answers with has the exit code and what the command printed, or the rows.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any


class Commands:
    """The process, for a test."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def run(self, *words: str) -> tuple[int, Any]:
        """Exit code of a command with `--json`, and its answer; the command must give one."""
        code, printed = self._ask(list(words))
        assert printed, self._log.read_text()[-4_000:]
        return code, json.loads(printed)

    def rows(self, query: str) -> list[list[Any]]:
        """The rows of a query."""
        code, rows = self._ask(["sql", query])
        assert code == 0, rows
        found: list[list[Any]] = rows
        return found

    def _ask(self, words: list[str]) -> tuple[int, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended: {self._log.read_text()[-4_000:]}"
        code, answer = json.loads(line)
        return code, answer


@contextmanager
def commands(environment: Mapping[str, str], folder: Path) -> Iterator[Commands]:
    """Start the process, and end it with the block; it works in `folder`."""
    log = folder / "commands.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield Commands(process, log)
        finally:
            process.communicate()


def _answer(words: list[str]) -> tuple[int, Any]:
    from qmq_client.cli import main
    from qmq_pipeline.spark.session import get_session

    if words[0] == "sql":
        rows = get_session().sql(words[1]).collect()
        return 0, [list(row) for row in rows]
    printed, code = io.BytesIO(), 0
    with redirect_stdout(io.TextIOWrapper(printed, write_through=True)):
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        text = printed.getvalue().decode()  # the wrapper closes it
    return code, text


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the JVM may print, too
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
