"""What docs/http.md lists is what the broker has."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import msgspec

from qmq_broker import errors
from qmq_broker.errors import (
    LockedError,
    NoRoomError,
    ServiceError,
    SharedFilesError,
    StoreError,
    UnknownFormatError,
)
from qmq_broker.face.answers import INTERNAL
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.routes.table import ROUTES
from qmq_broker.service.delay import query as delayed_query
from qmq_client.wire import errors as wire_errors
from qmq_client.wire.errors import InvalidMessageError, ProtocolError
from qmq_client.wire.requests import UNKNOWN_ROUTES
from tests.conftest import require_program
from tests.kit.broker_process import BrokerProcess
from tests.tidy.house import product
from tests.tidy.markdown import blocks

#: Branches that nobody raises, and what only a start meets.
NOT_ANSWERED = {
    StoreError,
    NoRoomError,
    ServiceError,
    LockedError,
    SharedFilesError,
    UnknownFormatError,
}
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")


def test_the_page_lists_every_route_with_what_it_takes_and_no_other() -> None:
    rows: dict[str, str] = {}
    for name, takes in re.findall(
        r"^\| `((?:GET|POST) /\S+)` \|[^|]*\|([^|]*)\|", PAGE, re.MULTILINE
    ):
        rows[name] = rows.get(name, "") + takes
    assert rows.keys() == {route.name for route in ROUTES}
    for route in ROUTES:
        takes = set(re.findall(r"`(\w+)`", rows[route.name]))
        named = {one.name for one in route.query}
        enumerated = {value for one in route.query for value in one.schema.get("enum", ())}
        if route.body is not None and not route.has_frames:
            named |= {field.name for field in msgspec.structs.fields(route.body)}
        assert named | (enumerated - {""}) <= takes, route.name


def test_the_page_has_every_code_of_a_refusal_with_its_status() -> None:
    table = PAGE.split("## Refusals")[1].split("## Exit codes")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", table, re.MULTILINE)
    listed = [
        (int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)
    ]
    assert len(set(listed)) == len(listed)
    found = codes_of_errors() | codes_of_the_face() | set(UNKNOWN_ROUTES.items())
    assert set(listed) == found | {(500, INTERNAL.code)}


def codes_of_errors() -> set[tuple[int, str]]:
    """Of every error from below that a request can meet."""
    kinds = {
        kind
        for module in (errors, wire_errors, delayed_query)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, (ServiceError, StoreError, InvalidMessageError, ProtocolError))
    }
    assert kinds > NOT_ANSWERED
    return {(kind.status, kind.code) for kind in kinds - NOT_ANSWERED}


def codes_of_the_face() -> set[tuple[int, str]]:
    """Of what is refused before anybody below sees it: the constants of each call of `refuse`."""
    return {
        (int(str(status.value)), str(code.value))
        for source in product("qmq_broker")
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "refuse"
        for status, code in [call.args[:2]]
        if isinstance(status, ast.Constant) and isinstance(code, ast.Constant)
    }


def test_the_page_explains_every_exit_code() -> None:
    table = PAGE.split("## Exit codes of the broker")[1]
    listed = {int(number) for number in re.findall(r"^\| (\d) \|", table, re.MULTILINE)}
    assert listed == set(ExitCode)


def test_the_shell_lines_of_the_page_do_what_they_say(tmp_path: Path) -> None:
    require_program("curl", "curl")
    (block,) = [one.text for one in blocks(PAGE) if one.language == "sh"]
    with BrokerProcess(tmp_path / "data") as broker:
        script = block.replace("http://127.0.0.1:9470", broker.url)
        ended = subprocess.run(["sh", "-ec", script], capture_output=True, timeout=60, check=False)
        assert ended.returncode == 0, (ended.stdout, ended.stderr)
        sent, rest = json.JSONDecoder().raw_decode(ended.stdout.decode())
        (row,) = json.loads(ended.stdout.decode()[rest:])["delayed"]
    assert (row["message_id"], row["state"]) == (sent["message_ids"][0], "pending")
    assert row["due_at_ms"] - sent["stored_at_ms"] in range(890_000, 900_001)
