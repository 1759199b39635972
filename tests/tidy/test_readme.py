"""What the README shows, works: every program and every command in it is run."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from qmq_client.commands.root import root
from tests.tidy import readme_blocks
from tests.tidy.house import ROOT
from tests.tidy.markdown import Block, blocks
from tests.tidy.readme_blocks import (
    CONSOLE,
    DOCUMENTED_ADDRESS,
    command_lines,
    flag_faults,
    is_checked_only,
    run,
    run_block,
    up,
)

#: Called as `qmq up --database URL --migrate --listen HOST:PORT`; answers everything with 204.
STAND_IN = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
assert sys.argv[1:3] == ["up", "--database"] and sys.argv[4:6] == ["--migrate", "--listen"]
host, port = sys.argv[6].split(":")
HTTPServer((host, int(port)), Handler).serve_forever()
"""


def runnable(page: str) -> list[Block]:
    """Return the blocks of a page that are programs or commands."""
    return [block for block in blocks(page) if block.language in CONSOLE | {"python"}]


README = runnable((ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("block", README, ids=[f"line-{block.line}" for block in README])
def test_a_block_of_the_readme_runs(block: Block, tmp_path: Path) -> None:
    assert block.language == "python" or command_lines(block), "no line starts with '$ '"
    assert run_block(block, tmp_path) == []


def test_the_readme_names_the_pythons_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = [
        int(one.removeprefix(prefix)) for one in project["classifiers"] if one.startswith(prefix)
    ]
    assert project["requires-python"] == f">=3.{minors[0]}"
    *earlier, last = (f"3.{minor}" for minor in minors)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python {', '.join(earlier)} or {last} (" in text


def test_the_readme_shows_something_to_run() -> None:
    assert README


def test_the_handler_of_the_example_ships_every_order_that_the_example_places(
    tmp_path: Path,
) -> None:
    (example,) = [block for block in README if block.runs_with == "up"]
    with up(tmp_path) as address:
        text = example.text.replace(DOCUMENTED_ADDRESS, address)
        (tmp_path / "shop.py").write_text(text, encoding="utf-8")
        assert run([sys.executable, "shop.py"], tmp_path) == []
        consume = subprocess.Popen(
            [*readme_blocks.QMQ, "consume", "shop:ship"],
            cwd=tmp_path,
            env={**os.environ, "QMQ_BROKER_URL": f"http://{address}", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        with consume:
            assert consume.stdout is not None
            assert consume.stdout.readline().startswith("shipping order ")
            assert run([sys.executable, "shop.py"], tmp_path) == []
            assert consume.stdout.readline().startswith("shipping order ")
            consume.send_signal(signal.SIGINT)
        assert consume.returncode == 0
    with sqlite3.connect(tmp_path / "shop.db") as database:
        assert database.execute("SELECT state FROM orders").fetchall() == [("shipped",)] * 2
    database.close()


def known_commands(command: click.Command, name: str) -> set[str]:
    """The command's whole name, and those of all below it."""
    names = {name}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            names |= known_commands(below, f"{name} {each}")
    return names


def test_every_command_that_a_sentence_names_is_one() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`(qmq(?: [a-z]+)+)(?=[` ])", text))
    assert len(named) > 10
    assert sorted(named - known_commands(root, "qmq")) == []


def planted(language: str, text: str) -> Block:
    return Block(line=1, language=language, text=text, runs_with=None)


def test_a_planted_failing_program_is_found(tmp_path: Path) -> None:
    assert run_block(planted("python", "assert 1 == 1\n"), tmp_path) == []
    assert "AssertionError" in run_block(planted("python", "assert 1 == 2\n"), tmp_path)[0]


def test_a_planted_failing_command_is_found(tmp_path: Path) -> None:
    text = "$ false\noutput\n$ touch \\\n  made\n"
    assert command_lines(planted("console", text)) == ["false", "touch    made"]
    assert run_block(planted("console", text), tmp_path)
    assert not (tmp_path / "made").exists()
    assert run_block(planted("sh", text.replace("false", "true")), tmp_path) == []
    assert (tmp_path / "made").exists()


def test_a_block_marked_with_up_finds_a_broker_at_the_documented_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme_blocks, "QMQ", [sys.executable, "-c", STAND_IN])
    text = (
        "from urllib.request import ProxyHandler, build_opener\n"
        "opener = build_opener(ProxyHandler({}))\n"
        "assert opener.open('http://127.0.0.1:9470/healthz').status == 204\n"
    )
    block = Block(line=1, language="python", text=text, runs_with="up")
    assert run_block(block, tmp_path) == []


def test_commands_that_would_not_end_are_checked_instead_of_run() -> None:
    assert is_checked_only("python3 dev.py test -k wire")
    assert is_checked_only("qmq broker serve --data d")
    assert not is_checked_only("qmq --help")
    assert flag_faults("python3 dev.py test -x --maxfail=2") == []
    assert flag_faults("python3 dev.py test --no-such-flag")
    assert flag_faults("python3 dev.py check lint types  # quick") == []
    assert flag_faults("python3 dev.py check spelling")
    assert flag_faults("python3 dev.py deploy")


def test_blocks_and_their_marks_are_read() -> None:
    page = (
        "text\n```python\na\n```\n<!-- runs with: broker -->\n```console\n$ b\n```\n```\nc\n```\n"
    )
    assert list(blocks(page)) == [
        Block(line=2, language="python", text="a\n", runs_with=None),
        Block(line=6, language="console", text="$ b\n", runs_with="broker"),
        Block(line=9, language="", text="c\n", runs_with=None),
    ]
    assert len(runnable(page)) == 2
