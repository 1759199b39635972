"""A verdict needs an end: nothing that could spoil it begins once the world is healed and at rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import dropwhile

import pytest

from tests.kit.events import AnyEvent, Attempt, Drained, Heal, Nacked
from tests.simulation.database import Databases
from tests.simulation.play import play

#: Among them are worlds in which one shop is slower than all others with the last transaction, and
#: worlds without dead letters in which groups look at everything again.
SEEDS = range(12)


@pytest.fixture(scope="module", params=SEEDS)
def events(request: pytest.FixtureRequest, worlds: Databases) -> Sequence[AnyEvent]:
    """The history of one world."""
    return play(request.param, worlds).world.ears.events


def test_no_shop_begins_anything_in_a_healed_world(events: Sequence[AnyEvent]) -> None:
    healed = dropwhile(lambda one: not isinstance(one, Heal), events)
    sent = [one for one in healed if isinstance(one, Attempt)]
    assert [one for one in sent if one.process.startswith("shop")] == []


def test_no_handler_fails_in_a_world_that_came_to_rest(events: Sequence[AnyEvent]) -> None:
    rested = dropwhile(lambda one: not isinstance(one, Drained), events)
    assert [one for one in rested if isinstance(one, Nacked)] == []
