"""The page about security does what it says: its commands run, its program sends over TLS."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from qmq_broker.face.authentication.access import Role
from qmq_broker.face.commands.broker import broker as broker_command
from qmq_broker.face.routes.table import ROUTES
from qmq_client.settings.sections import BrokerSection
from qmq_client.transport.address import BrokerAddress
from tests.broker.face.guard import Authority
from tests.conftest import require_program
from tests.kit.broker_process import ROOT, BrokerProcess
from tests.tidy.markdown import blocks
from tests.tidy.readme_blocks import DOCUMENTED_ADDRESS, command_lines

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
QMQ = f"{shlex.quote(sys.executable)} -m qmq_client"
RUN_S_MAX = 60
STRICT = """
import ssl
made = ssl.create_default_context
def strictly(*given, **named):
    context = made(*given, **named)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context
ssl.create_default_context = strictly
"""


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


def ran_all(lines: list[str], folder: Path) -> str:
    """What they print, run one after the other in one shell."""
    script = "\n".join(line.replace("qmq ", f"{QMQ} ", 1) for line in lines)
    ran = run(f"set -e\n{script}", folder)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_commands_and_the_program_of_the_page_run(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.file.rename(tmp_path / "authority.pem")
    lines = [line for line in console() if line.startswith("qmq broker token")]
    told = ran_all([line for line in lines if "--certificate" not in line], tmp_path)
    assert "billing  consumer:orders.*  token, valid until" in told, "the last one lists them all"
    options = ["--tokens", str(tmp_path / "tokens.json"), *authority.server_options()]
    (program,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    with BrokerProcess(tmp_path / "data", *options) as broker:
        program = program.replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}")
        ran = run([sys.executable, "-W", "error", "-c", program], tmp_path)
    assert (ran.stdout, ran.stderr) == ("1\n", "")


def test_the_authority_of_the_page_lets_its_clients_in_and_nobody_else(tmp_path: Path) -> None:
    require_program("openssl", "openssl")  # the page's authority is made by it
    lines = console()
    ran_all([line for line in lines if line.startswith("openssl") or "--certif" in line], tmp_path)
    (serve,) = [line for line in lines if "--tls-client-ca" in line]
    options = [
        word if word.startswith("--") else str(tmp_path / word)
        for word in shlex.split(serve.partition(" --tokens ")[2])
    ]
    asked = lines[lines.index(serve) + 1 :]
    with BrokerProcess(tmp_path / "data", "--tokens", *options) as broker:
        here = [line.replace(DOCUMENTED_ADDRESS, f"{broker.host}:{broker.port}") for line in asked]
        strict = tmp_path / "sitecustomize.py"  # as newer Pythons do: no slip of the certificates
        strict.write_text(STRICT)
        assert "orders.eu" in ran_all(["export PYTHONPATH=$PWD:$PYTHONPATH", *here], tmp_path)
        alone = run("\n".join([here[0], here[-1].replace("qmq", QMQ, 1)]), tmp_path)
        assert "give broker.cert_file and broker.key_file" in alone.stderr
        drain = run("\n".join([*here[:2], f"{QMQ} broker drain"]), tmp_path)
        assert "has no role admin for all subjects. Create a token with it" in drain.stderr
        assert drain.stderr.endswith("qmq broker token add, --role admin.\n")


def test_every_option_of_the_page_is_one() -> None:
    for line in console():
        if line.startswith("qmq broker serve"):
            words = shlex.split(line)[2:]
            with broker_command.make_context("broker", words, resilient_parsing=True) as context:
                name, command, rest = broker_command.resolve_command(context, words)
                assert name == "serve"
                assert command is not None
                known = {option for each in command.params for option in each.opts}
            assert {word for word in rest if word.startswith("--")} <= known


def test_every_setting_and_role_is_in_its_table() -> None:
    for name in BrokerSection.__struct_fields__:
        assert f"`{name}`" in PAGE
        assert f"`QMQ_BROKER_{name.upper()}`" in PAGE
    assert {field.name for field in fields(BrokerAddress)} == set(BrokerSection.__struct_fields__)
    assert all(f"| `{role}` |" in PAGE for role in Role)


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.CONSUMER])
def test_the_table_of_roles_has_what_each_may_change(role: Role) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{role}` |")]
    routes = [one for one in ROUTES if one.method == "POST" and role in one.roles]
    assert routes
    missing = [one.path for one in routes if one.path.rpartition("/")[2] not in row]
    assert not missing
