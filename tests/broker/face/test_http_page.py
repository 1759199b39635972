"""What docs/http.md lists is what the broker has."""

from __future__ import annotations

import re
from pathlib import Path

from qmq_broker.face.admin import admin_app
from qmq_broker.face.answers import statuses
from qmq_broker.face.exit_codes import ExitCode
from qmq_broker.face.hot import HotRoutes
from qmq_broker.face.limits import FaceLimits
from tests.broker.service.rig import Rig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "http.md").read_text(encoding="utf-8")


def test_the_page_lists_every_route_and_no_other(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    hot = HotRoutes(rig.broker, FaceLimits(), instance=1)
    routes = {f"POST {path}" for path in hot.paths}
    for route in admin_app(rig.broker).routes:
        method = "POST" if "POST" in route.methods else "GET"  # type: ignore[attr-defined]
        routes.add(f"{method} {route.path}")  # type: ignore[attr-defined]
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
