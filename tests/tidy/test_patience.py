"""No test gives up because the machine is busy: what has a short patience of its own is told ours."""

from __future__ import annotations

import ast

from hypothesis import HealthCheck, settings

from tests.tidy.house import Source, python

#: Of httpx, which waits 5 s for each step of an answer: less than a busy disk takes now and then.
CALLS = {"AsyncClient", "Client", "delete", "get", "post", "put", "request", "stream"}
#: One of these says how long, or that nobody is waited for.
SAID_BY = {"timeout", "transport"}
#: What asks a clock.
CLOCKS = {"monotonic", "monotonic_ns", "now", "time", "time_ns", "today", "utcnow"}


def short_patience(source: Source) -> list[str]:
    """Return each call of httpx that waits as long as httpx likes."""
    return [
        f"{source.path}:{node.lineno} httpx.{node.func.attr}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in CALLS) == ("httpx", True)
        and not SAID_BY & {keyword.arg for keyword in node.keywords}
    ]


def early_looks(source: Source) -> list[str]:
    """Return each look at a clock when a module is imported: its tests may run an hour later."""
    return [
        f"{source.path}:{node.lineno}"
        for statement in source.tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
    ]


def test_every_request_of_a_test_says_how_long_it_waits() -> None:
    sources = [source for source in python() if source.path.startswith("tests/")]
    assert sources
    assert [fault for source in sources for fault in short_patience(source)] == []


def test_a_planted_short_patience_is_found() -> None:
    for line in ("httpx.get(url)", "with httpx.Client(base_url=url) as client: pass"):
        assert short_patience(Source(path="a.py", text=line)), line
    for line in ("httpx.get(url, timeout=60)", "httpx.Client(transport=fake)", "client.get(url)"):
        assert not short_patience(Source(path="a.py", text=line)), line


def test_no_test_takes_the_time_of_its_collection_for_that_of_its_run() -> None:
    sources = [source for source in python() if source.path.startswith("tests/")]
    assert sources
    assert [fault for source in sources for fault in early_looks(source)] == []


def test_a_planted_early_look_is_found() -> None:
    for line in ("NOW = datetime.now(UTC)", "AT: Final = round(time.time() * 1000)"):
        assert early_looks(Source(path="a.py", text=line)), line
    for line in ("def f():\n    return datetime.now(UTC)", "NOW = datetime(2026, 1, 2)"):
        assert not early_looks(Source(path="a.py", text=line)), line


def test_an_example_of_a_random_test_may_take_its_time() -> None:
    """Hypothesis gives each 200 ms, and all of them a second to be drawn."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
