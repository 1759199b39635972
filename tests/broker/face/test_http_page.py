"""What docs/http.md lists is what the broker has."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from starlette.routing import Route

from qmq_broker.face.answers import statuses
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.limits import FaceLimits
from qmq_broker.face.routes.admin import admin_app
from qmq_broker.face.routes.hot import HotRoutes
from tests.broker.service.rig import Rig
from tests.kit.broker_process import BrokerProcess
from tests.tidy.markdown import blocks

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")


def test_the_page_lists_every_route_and_no_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    hot = HotRoutes(rig.broker, FaceLimits(), instance=1)
    routes = {f"POST {path}" for path in hot.paths}
    for route in admin_app(rig.broker).routes:
        assert isinstance(route, Route)
        assert route.methods is not None
        method = "POST" if "POST" in route.methods else "GET"
        routes.add(f"{method} {route.path}")
    assert set(re.findall(r"^\| `((?:GET|POST) /\S+)` \|", PAGE, re.MULTILINE)) == routes
    rig.close()


def test_the_page_explains_every_status_of_an_error() -> None:
    table = PAGE.split("## Refusals")[1].split("## How")[0]
    listed = {int(number) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
              for number in row.split(",")}  # fmt: skip
    assert statuses() <= listed


def test_the_page_explains_every_exit_code() -> None:
    table = PAGE.split("## How the process ends")[1]
    listed = {int(number) for number in re.findall(r"^\| (\d) \|", table, re.MULTILINE)}
    assert listed == set(ExitCode)


def test_the_shell_lines_of_the_page_do_what_they_say(tmp_path: Path) -> None:
    (block,) = [one.text for one in blocks(PAGE) if one.language == "sh"]
    with BrokerProcess(tmp_path / "data") as broker:
        script = block.replace("http://127.0.0.1:9470", broker.url)
        ended = subprocess.run(["sh", "-ec", script], capture_output=True, timeout=60, check=False)
        assert ended.returncode == 0, (ended.stdout, ended.stderr)
        sent, rest = json.JSONDecoder().raw_decode(ended.stdout.decode())
        (row,) = json.loads(ended.stdout.decode()[rest:])["delayed"]
    assert (row["message_id"], row["state"]) == (sent["message_ids"][0], "pending")
    assert row["due_at_ms"] - sent["stored_at_ms"] in range(890_000, 900_001)
