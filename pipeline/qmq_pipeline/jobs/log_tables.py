"""What `ingest` and `archive` share: find the log, let workers write ranges of it, commit what they wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qmq_pipeline.errors import OptionError, SourceError
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import COMMIT_LOG
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.places import open_log, with_token
from qmq_pipeline.sources.tasks import run_tasks
from qmq_pipeline.tables.commits import RangeFacts, range_facts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.marker import is_lake
from qmq_pipeline.tables.schemas import MESSAGES
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.completeness import next_sequences

if TYPE_CHECKING:
    from qmq_pipeline.sources.tasks import Workers

#: Table name → what was written to it, in order of the log.
Written = dict[str, list[RangeFacts]]


def prepared(config: PipelineConfig, verb: str) -> tuple[Place, Lake]:
    """The place to read, with its token, and the folder, which is created if missing.

    The place is checked before a folder is created for it. `verb` tells errors what the place is
    wanted for.
    """
    place = checked_place(config, verb)
    lake = Lake(config.tables)
    lake.prepare()
    return place, lake


def checked_place(config: PipelineConfig, verb: str) -> Place:
    """The place to read, with its token, if it has a log that can be read."""
    if config.place is None:
        raise OptionError(
            option="path",
            value="not given",
            allowed="a data directory or a broker",
            remedy=f"Say with --path or --broker what is to be {verb}.",
        )
    place = with_token(config.place, os.environ)
    if place.path is not None and is_lake(place.path):
        raise SourceError(
            source=place.name,
            reason="it is a folder of tables, such as an archive, and no log",
            remedy="Give it as --tables: the other jobs work on it as it is",
        )
    open_log(place, COMMIT_LOG).close()
    return place


def written(
    workers: Workers, work: str, tables: Sequence[Table], pieces: Sequence[dict[str, Any]]
) -> Written:
    """Let workers do these pieces; `work` names the function for one piece."""
    found: Written = {table.name: [] for table in tables}
    for answer in run_tasks(workers, work, pieces):
        for name, facts in answer.items():
            found[name].append(range_facts(facts))
    return found


def commit(
    lake: Lake,
    tables: Sequence[Table],
    found: Written,
    known: Mapping[str, int],
    *,
    is_from_start: bool,
) -> dict[str, int]:
    """Commit ranges. The table that says how far the log was read comes last, so it is never ahead of the others.

    `known`: subject → the next sequence expected. Returns the same behind these ranges, and notes
    it.
    """
    facts, expected = found[tables[0].name], dict(known)
    if tables[0] is MESSAGES:
        expected = next_sequences(expected, facts, is_from_start=is_from_start)
        facts[-1] = replace(facts[-1], notes={**facts[-1].notes, "next_sequences": expected})
    for table in reversed(tables):
        lake.commit(table, found[table.name])
    return expected
