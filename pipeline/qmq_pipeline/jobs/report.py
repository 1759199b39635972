"""`qmq pipeline report`: the gold tables and the newest audit as one HTML page.

What the page shows of gold is kept beside it and shown again while gold stays the same; the audit
is read without Spark. So the page of a run that found nothing new starts no Spark.
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeError, OptionError
from qmq_pipeline.jobs.audit import KINDS
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.jobs.report_gold import ROWS_MAX, as_grid, gold_facts
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.report.facts import GoldFacts, Grid, ReportFacts, Verdict
from qmq_pipeline.report.page import render
from qmq_pipeline.spark.session import session_of
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.schemas import AUDIT_FINDINGS, AUDIT_RUN, FLOW_MINUTE

if TYPE_CHECKING:
    from qmq_pipeline.spark.session import Spark

_STEPS: Final = 2
#: Changes with each change of `GoldFacts` or the queries that fill it; facts kept under another
#: number are not used.
_PAGE: Final = 1
_FINDING_COLUMNS: Final = {
    "at": "at",
    "subject": "subject",
    "message_id": "message",
    "database": "database",
    "sequence": "sequence",
    "evidence": "evidence",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """What was written."""

    path: str
    bytes: int
    #: Findings of the newest audit; None if there was none.
    findings: int | None


def report(
    spark: Spark, config: PipelineConfig, path: str, *, on_progress: OnProgress = nobody
) -> Reported:
    """Write the page to `path`, whole or not at all. Raises `LakeError` if there are no marts.

    `spark`: a session, or a function that gives one; it is not called if gold is the same as for
    the last page.
    """
    facts = collect(spark, config, on_progress=on_progress)
    page = render(facts).encode()
    target = Path(path)
    draft = target.with_name(f".{target.name}.draft")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(page)
        draft.replace(target)
    except OSError as error:
        raise OptionError(
            option="--out",
            value=f"{path}: {error.strerror or error}",
            allowed="a file that can be written",
            remedy="Name another file.",
        ) from error
    findings = None if facts.verdict is None else facts.verdict.findings
    return Reported(path=str(target.absolute()), bytes=len(page), findings=findings)


def collect(
    spark: Spark, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> ReportFacts:
    """Everything on the page."""
    lake = Lake(config.tables)
    lake.require()
    newest = lake.newest(FLOW_MINUTE)
    if newest is None:
        raise LakeError(
            path=config.tables,
            reason="there are no marts yet",
            remedy="Run `qmq pipeline marts` first, or `qmq pipeline run` for all in order",
        )
    # It is the last gold table to be written, so its commit names the state of all.
    gold = _kept(lake, newest.name)
    if gold is None:
        gold = gold_facts(session_of(spark), lake)
        _keep(lake, newest.name, gold)
    on_progress(Progress(stage="report", done=1, total=_STEPS, rows=0))
    verdict, findings = _audited(lake)
    on_progress(Progress(stage="report", done=_STEPS, total=_STEPS, rows=0))
    return ReportFacts(
        **{one.name: getattr(gold, one.name) for one in fields(gold)},
        made_at=datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000, UTC),
        tables=config.tables,
        verdict=verdict,
        findings=findings,
    )


def _keep(lake: Lake, made: str, gold: GoldFacts) -> None:
    """Keep the facts for the next page. MessagePack keeps times in rows of any type; JSON would make them texts."""
    packed = base64.b64encode(msgspec.msgpack.encode(gold)).decode()
    with contextlib.suppress(OSError):  # who may only read the tables gets a page, too
        lake.write_state(FLOW_MINUTE, {"made": made, "page": _PAGE, "gold": packed})


def _kept(lake: Lake, made: str) -> GoldFacts | None:
    """The kept facts of gold as it was `made`; None if gold or the kind of page has changed."""
    state = lake.read_state(FLOW_MINUTE)
    if (state.get("made"), state.get("page")) != (made, _PAGE):
        return None
    return msgspec.msgpack.decode(base64.b64decode(state["gold"]), type=GoldFacts)


def _audited(lake: Lake) -> tuple[Verdict | None, dict[str, Grid]]:
    newest = lake.newest(AUDIT_RUN)
    if newest is None:
        return None, {}
    (run,) = (
        row
        for one in newest.ranges
        for file in one.files
        for batch in lake.read_file(AUDIT_RUN, file.path, AUDIT_RUN.names)
        for row in batch.to_pylist()
    )
    verdict = Verdict(
        run=run["run"],
        as_of=run["as_of"],
        counts={kind: int(run[kind]) for kind in KINDS},
        judged={
            name: int(run[name])
            for name in ("committed", "stored", "expected", "delivered", "settled", "quarantined")
        },
        coverage=tuple(part for part in run["coverage"].split("; ") if part),
    )
    if not verdict.findings:
        return verdict, {}
    every = pa.Table.from_batches(
        batch
        for commit in lake.commits(AUDIT_FINDINGS)
        if commit.name == verdict.run
        for one in commit.ranges
        for file in one.files
        for batch in lake.read_file(AUDIT_FINDINGS, file.path, ["kind", *_FINDING_COLUMNS])
    )
    order = [("at", "ascending"), ("message_id", "ascending")]
    found: dict[str, Grid] = {}
    for kind, count in verdict.counts.items():
        if count:
            some = every.filter(pc.field("kind") == kind)
            rows = some.sort_by(order).slice(0, ROWS_MAX).to_pylist()
            found[kind] = as_grid("", rows, _FINDING_COLUMNS, count)
    return verdict, found
