"""A test that listens to every engine is alone with that."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from tests.kit.listening import left_behind, listening


def test_what_listened_to_all_engines_and_pools_leaves_nothing_behind() -> None:
    texts: list[str] = []
    opened: list[object] = []
    engine = sa.create_engine("sqlite://")
    with (
        listening(sa.Engine, before_cursor_execute=lambda *given: texts.append(str(given[2]))),
        listening(sa.Pool, connect=lambda driver, _: opened.append(driver)),
        engine.connect() as connection,
    ):
        connection.exec_driver_sql("SELECT 1")
    assert (texts, len(opened)) == (["SELECT 1"], 1)
    assert left_behind() == []
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 2")
        assert (connection._has_events, engine._has_events) == (False, False), "the fast path"
    assert texts == ["SELECT 1"]
    engine.dispose()


@pytest.mark.parametrize(
    ("owner", "name", "called"),
    [(sa.Engine, "commit", "statements"), (sa.Pool, "checkout", "checkout")],
)
def test_what_is_left_behind_is_named_and_put_in_order(
    owner: type[sa.Engine | sa.Pool], name: str, called: str
) -> None:
    sa.event.listen(owner, name, lambda *_: None)
    assert left_behind() == [called]
    assert left_behind() == []
