"""What the README shows, works: every program and every command in it is run."""

from __future__ import annotations

import os
import re
import signal
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
    broker,
    command_lines,
    flag_faults,
    is_checked_only,
    run,
    run_block,
)

#: Called as `qmq broker serve --data DIRECTORY --listen HOST:PORT`; answers everything with 204.
STAND_IN_BROKER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
assert sys.argv[1:4] == ["broker", "serve", "--data"] and sys.argv[5] == "--listen"
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
    assert f"You need Python {', '.join(earlier)} or {last} " in text


def test_the_readme_shows_something_to_run() -> None:
    assert README


def test_the_example_runs_again_and_its_handler_is_one_for_consume(tmp_path: Path) -> None:
    (example,) = [block for block in README if block.runs_with == "broker"]
    with broker(tmp_path / "broker") as address:
        text = example.text.replace(DOCUMENTED_ADDRESS, address)
        (tmp_path / "shop.py").write_text(text, encoding="utf-8")
        for _ in range(2):
            assert run([sys.executable, "shop.py"], tmp_path) == []
        consume = subprocess.Popen(
            [*readme_blocks.QMQ, "consume", "shop:ship"],
            cwd=tmp_path,
            env={**os.environ, "QMQ_BROKER_URL": f"http://{address}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        with consume:
            assert consume.stderr is not None
            started = next((line for line in consume.stderr if "consumers_started" in line), "")
            consume.send_signal(signal.SIGTERM)
            rest = consume.stderr.read()
        assert "handlers=1" in started
        assert consume.returncode == 0, rest


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
    text = (ROOT / "README.md").read_text(encoding="utf-8")
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


def test_a_block_marked_with_broker_finds_one_at_the_documented_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme_blocks, "QMQ", [sys.executable, "-c", STAND_IN_BROKER])
    text = (
        "from urllib.request import ProxyHandler, build_opener\n"
        "opener = build_opener(ProxyHandler({}))\n"
        "assert opener.open('http://127.0.0.1:9470/healthz').status == 204\n"
    )
    block = Block(line=1, language="python", text=text, runs_with="broker")
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
