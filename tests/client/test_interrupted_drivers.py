"""Transactions that a signal handler ends in the middle of the driver's own steps, on servers.

The connection may be unusable afterwards, and a COMMIT under way may have happened or not. The message
is sent if and only if the business row is there, the receipt does not say otherwise, and the next
transaction goes through.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from qmq_client.publishing.receipts import Fate
from tests.client.test_interrupted_producer import fail, shop_of
from tests.client.world import World
from tests.kit.interrupting import Interruption

#: Each place costs a transaction and perhaps a connection; neighbours differ little.
STRIDE: Final = 3
#: A connection whose goodbye is interrupted says so where it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_S1_S2_S3_a_signal_that_raises_inside_the_driver_leaves_all_or_nothing(
    server_world: World,
) -> None:
    world = server_world
    driver: Any = world.engine.dialect.loaded_dbapi
    within = [str(Path(driver.__file__).parent)]
    fates: Counter[Fate | None] = Counter()
    for at in count(step=STRIDE):
        interruption = Interruption(fail, within=within, at=at)
        with shop_of(world, interruption, background=False) as shop:
            interruption.around(partial(shop.order, "interrupted"))
        assert world.checked_out() == 0, interruption.place
        receipt = shop.receipts.get(f"{at} interrupted")
        if receipt is not None:
            fates[receipt.fate] += 1
        if not interruption.place:
            break
    assert at > 100
    assert fates[Fate.LEFT] > 0, "some were interrupted while the COMMIT was under way"
    assert fates[Fate.ACCEPTED] > 0
