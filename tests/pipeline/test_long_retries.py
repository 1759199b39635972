"""Long retries, from the broker's own service to tables and verdict, with planted faults."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_client.group.actions import Action, BroughtBack, Ended, SetAside, Skipped, Sought
from qmq_client.wire.names import OWN_PREFIX
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import MARTS, marts
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.tables.schemas import (
    ACTIONS,
    AUDIT_FINDINGS,
    DELIVERIES,
    LIFECYCLE,
    LOG,
    MESSAGES,
)
from qmq_pipeline.tables.table import Table
from tests.broker.delay.delay_rig import HOUR_MS, DelayRig
from tests.broker.service.rig import GROUP, SUBJECT
from tests.pipeline.bronze import write_bronze
from tests.pipeline.rows import rows_of
from tests.pipeline.test_fold import AT_MS, DEFINED, folded, nacked, outcomes, pulled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DAY_MS = 24 * HOUR_MS
#: No copy has it.
NO_RETRY_ID = 7


class LongRetryWorld:
    """A broker with long retries."""

    def __init__(self, path: Path) -> None:
        self.rig = DelayRig(path)

    def give_back(self, body: bytes, wait_ms: int) -> None:
        rig = self.rig
        rig.send(body)
        rig.settle(rig.pull().nack(wait_ms, "not before spring"))
        self.turn()

    def turn(self) -> None:
        """What the broker does by time but releasing, until nothing changes."""
        for _ in range(4):
            self.rig.broker.long_retries.step(self.rig.now_ms)
            self.rig.clock.pass_ms(1_000)
            self.rig.commit()

    def close(self) -> PipelineConfig:
        """Stop in order; judged is up to the broker's now."""
        until_ms, path = self.rig.now_ms, self.rig.directory
        self.rig.close()
        return PipelineConfig(
            tables=str(path.parent / "tables"),
            place=Place(path=str(path)),
            audit=AuditOptions(until_ms=until_ms),
        )


def test_P4_an_ended_long_retry_is_sound_and_lost_copies_are_found(
    spark: SparkSession, tmp_path: Path
) -> None:
    world = LongRetryWorld(tmp_path / "broker")
    rig = world.rig
    world.give_back(b"comes back", 2 * HOUR_MS)
    world.give_back(b"stays away", 100 * DAY_MS)
    rig.clock.pass_ms(3 * HOUR_MS)
    rig.release()
    world.turn()
    back = rig.pull()
    assert back.bodies == [b"comes back"]
    rig.settle(back.ack())
    world.give_back(b"its copy comes, and the group is not told", 2 * HOUR_MS)
    world.give_back(b"its copy does not come in time", 4 * HOUR_MS)
    rig.clock.pass_ms(3 * HOUR_MS)
    rig.release()
    rig.send(b"its copy was never made")
    rig.settle(rig.pull().nack(HOUR_MS // 2))
    rig.store.actions.append([SetAside(rig.now_ms, SUBJECT, GROUP, 4, 5, NO_RETRY_ID)])
    rig.clock.pass_ms(3 * HOUR_MS)
    config = world.close()

    write_bronze(config)
    assert "are not judged" in " ".join(audit(spark, config).coverage)
    lifecycle(spark, config)
    result = audit(spark, config)
    rows = sorted(rows_of(config.tables, LIFECYCLE), key=itemgetter("sequence"))
    told = rows_of(config.tables, AUDIT_FINDINGS, run=result.run)
    assert [row["outcome"] for row in rows] == ["acked", *["long retry"] * 4]
    came_back, away = rows[0], rows[1]
    assert came_back["long_retry_at"] < came_back["redelivered_at"] < came_back["settled_at"]
    assert (away["redelivered_at"], away["error"], away["attempts"]) == (
        None,
        "not before spring",
        1,
    )
    found = {(one["kind"], one["message_id"]): one["evidence"] for one in told}
    untold, late, lost = (row["message_id"] for row in rows[2:])
    assert found.keys() == {("lost", untold), ("late", late), ("lost", lost)}
    assert {(one["subject"], one["consumer_group"]) for one in told} == {(SUBJECT, GROUP)}
    assert "the group did not get it" in found["lost", untold]
    assert "its copy has not come back" in found["late", late]
    assert "does not have its copy" in found["lost", lost]
    _is_the_brokers_own(spark, config)


def _is_the_brokers_own(spark: SparkSession, config: PipelineConfig) -> None:
    """Actions and copies of the broker's own are in bronze, and nowhere else."""
    marts(spark, config)
    copies = rows_of(config.tables, LOG, kind="copy")
    assert len(copies) == 6
    assert [row["copy_sequence"] for row in copies].count(None) == 4

    def has_own(table: Table) -> bool:
        return any(
            str(row["subject"]).startswith(OWN_PREFIX) for row in rows_of(config.tables, table)
        )

    assert has_own(ACTIONS)
    with_subjects = [table for table in (DELIVERIES, LIFECYCLE, *MARTS) if "subject" in table.names]
    for table in with_subjects:
        assert not has_own(table), table.name
    closed = replace(config, audit=replace(config.audit, is_closed_world=True))
    ghosts = audit(spark, closed).findings["ghost"]
    assert ghosts == len(rows_of(config.tables, MESSAGES))  # without an outbox; the copies are none


SENT_BACK: list[Action] = [DEFINED, pulled(1, 0, (0, 3, 1)), nacked(2, 0, 3, error="later")]
LONG_RETRY = SetAside(AT_MS + 3, "orders", "billing", 0, 2, NO_RETRY_ID)


def test_a_message_in_a_long_retry_waits_until_it_ends() -> None:
    found = folded([*SENT_BACK, LONG_RETRY])
    assert outcomes(found) == {0: "long retry", 1: "long retry", 2: "returned"}
    assert found[0]["long_retry_at"] == datetime.fromtimestamp((AT_MS + 3) / 1000, UTC)
    again = folded(
        [
            *SENT_BACK,
            LONG_RETRY,
            BroughtBack(AT_MS + 9, "orders", "billing", 1, 44),
            pulled(10, 3, (1, 1, 2)),
        ]
    )
    assert outcomes(again) == {0: "long retry", 1: "in flight", 2: "returned"}
    assert again[1]["redelivered_at"] == datetime.fromtimestamp((AT_MS + 9) / 1000, UTC)
    assert (again[1]["error"], again[1]["attempts"]) == ("later", 2)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (Skipped(AT_MS + 5, "orders", "billing", 0, 3), "long retry"),
        (Sought(AT_MS + 5, "orders", "billing", 3), "skipped"),
        (Ended(AT_MS + 5, "orders", "billing"), "skipped"),
    ],
    ids=["the log lost it", "the group was moved", "the group ended"],
)
def test_a_long_retry_is_given_up_with_its_group_and_not_with_the_log(
    change: Action, outcome: str
) -> None:
    assert folded([*SENT_BACK, LONG_RETRY, change])[0]["outcome"] == outcome
