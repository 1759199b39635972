"""No test gives up because the machine is busy: what has a short patience of its own is told ours."""

from __future__ import annotations

import ast

from hypothesis import HealthCheck, settings

from tests.tidy.house import Source, python

#: Of httpx, which waits 5 s for each step of an answer: less than a busy disk takes now and then.
CALLS = {"AsyncClient", "Client", "delete", "get", "post", "put", "request", "stream"}
#: One of these says how long, or that nobody is waited for.
SAID_BY = {"timeout", "transport"}


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


def test_every_request_of_a_test_says_how_long_it_waits() -> None:
    sources = [source for source in python() if source.path.startswith("tests/")]
    assert sources
    assert [fault for source in sources for fault in short_patience(source)] == []


def test_a_planted_short_patience_is_found() -> None:
    for line in ("httpx.get(url)", "with httpx.Client(base_url=url) as client: pass"):
        assert short_patience(Source(path="a.py", text=line)), line
    for line in ("httpx.get(url, timeout=60)", "httpx.Client(transport=fake)", "client.get(url)"):
        assert not short_patience(Source(path="a.py", text=line)), line


def test_an_example_of_a_random_test_may_take_its_time() -> None:
    """Hypothesis gives each 200 ms, and all of them a second to be drawn."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
