"""Data never becomes code, TLS is never left unchecked, and secrets are never compared with `==`."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tidy.house import Source, product

#: Formats whose readers run what they read.
RUNS_WHAT_IT_READS = {"cloudpickle", "dill", "jsonpickle", "marshal", "pickle", "shelve", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__"}
OS_CALLS = {"system", "popen", "execl", "execv", "execvp", "spawnl", "spawnv", "startfile"}
UNCHECKED = {"CERT_NONE", "CERT_OPTIONAL", "_create_unverified_context"}
SECRET = ("token", "secret", "digest", "password")


def faults(source: Source) -> list[str]:
    found = []
    for node in ast.walk(source.tree):
        if what := fault(node):
            found.append(f"{source.path}:{getattr(node, 'lineno', 0)} {what}")
    return found


def fault(node: ast.AST) -> str | None:
    match node:
        case ast.Import(names=names):
            found = {alias.name.partition(".")[0] for alias in names} & RUNS_WHAT_IT_READS
            return f"import {min(found)}" if found else None
        case ast.ImportFrom(module=str(module)):
            name = module.partition(".")[0]
            return f"from {name}" if name in RUNS_WHAT_IT_READS else None
        case ast.Attribute(attr=name) if name in UNCHECKED:
            return name
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in OS_CALLS:
            return f"os.{name}"
        case ast.Call():
            return call_fault(node)
        case ast.Assign(targets=[ast.Attribute(attr="check_hostname")]):
            return "check_hostname is set"
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()]):
            return compare_fault(node)
    return None


def call_fault(node: ast.Call) -> str | None:
    if isinstance(node.func, ast.Name) and node.func.id in CALLS:
        return f"{node.func.id}()"
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg, value) in (("shell", True), ("verify", False)):
            return f"{keyword.arg}={value!r}"
    return None


def compare_fault(node: ast.Compare) -> str | None:
    """Two values of which one is called like a secret; a literal is none."""
    names = [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in (node.left, *node.comparators)
        if isinstance(each, ast.Name | ast.Attribute)
    ]
    secret = [
        name
        for name in names
        if any(part in name.lower() for part in SECRET) and not name.endswith("_id")
    ]
    return f"== on {secret[0]}" if len(names) == 2 and secret else None


#: Where tokens of callers are; elsewhere a token is a number that everybody may know.
SECRETS_ARE_IN = (
    "broker/qmq_broker/face/",
    "qmq_client/transport/address",
    "qmq_client/transport/http",
)


@pytest.fixture(scope="module")
def found() -> list[str]:
    """In the whole product."""
    return [one for source in product() for one in faults(source)]


#: A handshake in memory with the broker's own certificate, to ask for its dates: there is no host.
IN_MEMORY = re.compile(r"broker/qmq_broker/face/callers/tls\.py:\d+ check_hostname is set")


def test_no_data_becomes_code_and_no_tls_goes_unchecked(found: list[str]) -> None:
    unchecked = [one for one in found if "== on" not in one and not IN_MEMORY.fullmatch(one)]
    assert unchecked == []


def test_secrets_are_compared_in_constant_time(found: list[str]) -> None:
    compared = [one for one in found if "== on" in one]
    assert compared, "elsewhere a token is a number that everybody may know"
    assert [one for one in compared if one.startswith(SECRETS_ARE_IN)] == []


def test_planted_faults_are_found() -> None:
    for line in [
        "import pickle",
        "from yaml import load",
        "eval(text)",
        "os.system(text)",
        "run(text, shell=True)",
        "Client(verify=False)",
        "context.verify_mode = ssl.CERT_NONE",
        "context.check_hostname = False",
        "if token == given: pass",
        "entry.digest != shown",
    ]:
        assert faults(Source(path="a.py", text=line)), line
    for line in ["re.compile(x)", "token == ''", "Client(verify=context)", "ast.literal_eval(x)"]:
        assert not faults(Source(path="a.py", text=line)), line
