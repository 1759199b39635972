"""The page about security does what it says: its commands run, its program sends over TLS."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from qmq_broker.face.access import Role
from qmq_broker.face.cli import broker as broker_command
from qmq_client.settings.sections import BrokerSection
from qmq_client.transport.address import BrokerAddress
from tests.broker.face.guard import Authority
from tests.broker.face.process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS, command_lines

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
QMQ = f"{shlex.quote(sys.executable)} -m qmq_client"
RUN_S_MAX = 60


def console() -> list[str]:
    shown = [block for block in blocks(PAGE) if block.language == "console"]
    return [line for block in shown for line in command_lines(block)]


def run(command: str | list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT / 'broker'}"},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )


def test_the_commands_and_the_program_of_the_page_run(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.file.rename(tmp_path / "authority.pem")
    for line in console():
        if line.startswith("qmq broker token"):
            ran = run(line.replace("qmq", QMQ, 1), tmp_path)
            assert ran.returncode == 0, ran.stderr
    assert "billing  consumer:orders.*" in ran.stdout, "the last one lists what the others made"
    options = ["--tokens", str(tmp_path / "tokens.json"), *authority.server_options()]
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        program = program.replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}")
        ran = run([sys.executable, "-W", "error", "-c", program], tmp_path)
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def test_every_option_of_the_page_is_one() -> None:
    (line,) = [line for line in console() if line.startswith("qmq broker serve")]
    words = shlex.split(line)[2:]
    with broker_command.make_context("broker", words, resilient_parsing=True) as context:
        name, command, rest = broker_command.resolve_command(context, words)
        assert name == "serve"
        assert command is not None
        known = {option for each in command.params for option in each.opts}
    assert {word for word in rest if word.startswith("--")} <= known
    assert "--tls-client-ca" in known


def test_every_setting_and_role_is_in_its_table() -> None:
    for name in BrokerSection.__struct_fields__:
        assert f"`{name}`" in PAGE
        assert f"`QMQ_BROKER_{name.upper()}`" in PAGE
    assert {field.name for field in fields(BrokerAddress)} == set(BrokerSection.__struct_fields__)
    assert all(f"| `{role}` |" in PAGE for role in Role)
