"""The table `deliveries`: the outcome of each message at each group, folded from the action log.

1. The actions of each group, in order, become *steps* on sequences (`fold/steps.py`): one task for
   a few groups; the work grows with the actions, not with the messages.
2. Steps are cut where a part of the log ends, by a join with the spans of subjects in parts.
3. For each subject, group and part, its steps are applied to the known state (`fold/blocks.py`): one
   task for each, which holds the messages of one subject in one part.

A fold continues an earlier one: it reads the actions since then, and the parts that they touch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from qmq_client.wire.names import OWN_PREFIX
from qmq_pipeline.fold.blocks import Block
from qmq_pipeline.fold.steps import IDLE_KINDS, STEPS, GroupMark, GroupSteps
from qmq_pipeline.spark.frames import arrow_frame
from qmq_pipeline.tables.schemas import ACTIONS, DELIVERIES, SPANS
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Separates subject and group in one name; neither contains a line break.
BREAK: Final = "\n"
#: The end of a group that still exists.
ENDLESS: Final = 2**63 - 1
_MARK: Final = "mark"
_ORDER: Final = STEPS.key[2:]
_STEPS: Final = STEPS.arrow()
_COLUMNS: Final = (
    "subject",
    "consumer_group",
    "action_offset",
    "action_number",
    "unix_micros(at) AS at",
    "action",
    "consumer",
    "first_sequence",
    "next_sequence",
    "first_pull",
    "next_pull",
    "attempt",
    "reason",
    "error",
    "action_json",
)
#: Actions that change no message; most only show that a consumer is alive.
_IDLE: Final = ", ".join(f"'{kind}'" for kind in IDLE_KINDS)
_BATCH_ROWS: Final = 20_000
#: Ranges of sequences are joined by blocks of this length: two ranges meet where they share a block.
_GRAIN: Final = 65_536
#: Steps cut at the ends of parts: one row for each part that a step has messages in. A span and a
#: step are joined once for each block that they share; each pair gives the piece in that block.
_PIECES: Final = f"""
WITH steps AS (
  SELECT *, EXPLODE(SEQUENCE(first DIV {_GRAIN}, (next - 1) DIV {_GRAIN})) AS grain FROM {{steps}}
), spans AS (
  SELECT subject, part, first_sequence, next_sequence,
         EXPLODE(SEQUENCE(first_sequence DIV {_GRAIN}, (next_sequence - 1) DIV {_GRAIN})) AS grain
  FROM {{spans}}
), pieces AS (
  SELECT s.subject, s.consumer_group, p.part, s.action_offset, s.action_number, s.number, s.op,
         GREATEST(s.first, p.first_sequence, s.grain * {_GRAIN}) AS first,
         LEAST(s.next, p.next_sequence, (s.grain + 1) * {_GRAIN}) AS next,
         s.at, s.attempt, s.reason, s.error
  FROM steps s JOIN spans p ON p.subject = s.subject AND p.grain = s.grain
)
SELECT * FROM pieces WHERE first < next
"""
_GROUPS: Final = pa.schema(
    [
        ("subject", pa.string()),
        ("consumer_group", pa.string()),
        ("group_first", pa.int64()),
        ("group_next", pa.int64()),
        # Tags of which a message must have at least one, and tags that it must have all; null if
        # the group's filter is not known from its beginning.
        ("any_tags", pa.list_(pa.string())),
        ("all_tags", pa.list_(pa.string())),
    ]
)
Marks = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The state of the table."""

    #: Rows that this fold wrote.
    rows: int = 0
    #: Subject and group → state of the group, see `GroupMark`.
    marks: Marks = field(default_factory=dict)
    #: Parts whose rows were written again; None for all.
    parts: frozenset[int] | None = frozenset()
    #: Offset up to which the action log was folded, and the part of that offset.
    after: tuple[int, int] = (0, 0)

    @property
    def unmatched(self) -> int:
        """Settlements of messages that were delivered before the table of actions begins."""
        return sum(mark["unmatched"] for mark in self.marks.values())


def fold_actions(
    tables: Tables, marks: Marks | None, *, first: tuple[int, int], after: tuple[int, int]
) -> Folded:
    """Bring the table up to `after`, an offset of the action log and its part, or to the first action that is ahead.

    `marks`: the state of the groups at the offset `first`; None to fold everything.
    """
    from pyspark import StorageLevel

    after = _first_ahead(tables, first, after)

    spark, is_whole = tables.spark, marks is None
    known = {} if marks is None else marks
    steps = group_steps(tables, known, first=first, after=after[0])
    steps = steps.persist(StorageLevel.DISK_ONLY)
    try:
        now = dict(known)
        for row in steps.where(f"op = '{_MARK}'").collect():
            now[group_name(row["subject"], row["consumer_group"])] = json.loads(row["reason"])
        some = steps.where(f"op <> '{_MARK}'")
        pieces = spark.sql(_PIECES, steps=some, spans=tables.read(SPANS))
        if is_whole:
            folded = _applied(pieces, spark.sql(DELIVERIES.nothing()), after[0])
            rows = tables.replace(folded, DELIVERIES)
            return Folded(rows=rows, marks=now, parts=None, after=after)
        pieces = pieces.persist(StorageLevel.DISK_ONLY)
        try:
            touched = {int(row["part"]) for row in pieces.select("part").distinct().collect()}
            rows = 0
            if touched:
                old = tables.read(DELIVERIES).where(_in_parts(touched))
                rows = tables.replace(_applied(pieces, old, after[0]), DELIVERIES, touched)
            return Folded(rows=rows, marks=now, parts=frozenset(touched), after=after)
        finally:
            pieces.unpersist()
    finally:
        steps.unpersist()


#: The first action about messages that are not in the table `log` yet: a run may read actions that happened after it
#: read the log, and of an archive the last segment is missing. An action older than the log's end
#: is not ahead: its messages had expired before a run read them.
_FIRST_AHEAD: Final = """
SELECT MIN(STRUCT(a.action_offset, a.part)) AS ahead
FROM {actions} a LEFT JOIN
  (SELECT subject, MAX(next_sequence) AS next_sequence FROM {spans} GROUP BY subject) s ON s.subject = a.subject
WHERE a.next_sequence > COALESCE(s.next_sequence, 0)
  AND a.at >= (SELECT COALESCE(MAX(last_at), TIMESTAMP_SECONDS(0)) FROM {spans})
"""


def _first_ahead(tables: Tables, first: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    """`after`, or the first action that cannot be folded yet; its part is the second value."""
    actions = _actions(tables, first, after[0])
    found = tables.spark.sql(_FIRST_AHEAD, actions=actions, spans=tables.read(SPANS)).collect()
    ahead = found[0]["ahead"]
    return after if ahead is None else (int(ahead[0]), int(ahead[1]))


def _actions(tables: Tables, first: tuple[int, int], after: int) -> DataFrame:
    offset, part = first
    return tables.read(ACTIONS).where(
        f"part >= {part} AND action_offset >= {offset} AND action_offset < {after} AND subject IS NOT NULL "
        f"AND consumer_group IS NOT NULL AND NOT startswith(subject, '{OWN_PREFIX}') "
        f"AND action NOT IN ({_IDLE})"
    )


def group_steps(tables: Tables, marks: Marks, *, first: tuple[int, int], after: int) -> DataFrame:
    """The actions of the groups since an offset, as steps in order; a row `mark` of each group has
    its state after them.
    """
    actions = _actions(tables, first, after)
    in_order = (
        actions.selectExpr(*_COLUMNS)
        .repartition("subject", "consumer_group")
        .sortWithinPartitions("subject", "consumer_group", "action_offset", "action_number")
    )
    return in_order.mapInArrow(_stepping(marks), STEPS.ddl())


def _stepping(marks: Marks) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The work of one task: groups one after the other, each in order."""

    def steps(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        name: tuple[str, str] | None = None
        group = GroupSteps()
        rows: list[dict[str, Any]] = []
        for batch in batches:
            for row in batch.to_pylist():
                if (row["subject"], row["consumer_group"]) != name:
                    if name is not None:
                        rows.append(_mark_row(name, group.mark))
                    name = (row["subject"], row["consumer_group"])
                    known = marks.get(group_name(*name))
                    group = GroupSteps(GroupMark.from_json(known) if known else None)
                for number, step in enumerate(group.of(row)):
                    rows.append(
                        {
                            "subject": name[0],
                            "consumer_group": name[1],
                            "action_offset": row["action_offset"],
                            "action_number": row["action_number"],
                            "number": number,
                            **step._asdict(),
                        }
                    )
            if len(rows) >= _BATCH_ROWS:
                yield pa.RecordBatch.from_pylist(rows, schema=_STEPS)
                rows = []
        if name is not None:
            rows.append(_mark_row(name, group.mark))
        if rows:
            yield pa.RecordBatch.from_pylist(rows, schema=_STEPS)

    return steps


def _mark_row(name: tuple[str, str], mark: GroupMark) -> dict[str, Any]:
    return {
        "subject": name[0],
        "consumer_group": name[1],
        "op": _MARK,
        "reason": json.dumps(mark.to_json()),
    }


def _applied(pieces: DataFrame, old: DataFrame, folded_to: int) -> DataFrame:
    """Rows of `deliveries` for all subjects, groups and parts of the steps or of the known state."""
    key = ("subject", "consumer_group", "part")

    def apply(steps: pa.Table, known: pa.Table) -> pa.Table:
        known_to = known["folded_to"][0].as_py() if known.num_rows else 0
        # If an earlier run died after it wrote this table, the table already includes some of these actions.
        some = steps.filter(pa.compute.field("action_offset") >= known_to)
        if not some.num_rows:
            return known.select(list(DELIVERIES.names)).cast(DELIVERIES.arrow())
        some = some.sort_by([(one, "ascending") for one in _ORDER])
        subject, group, part = (some[name][0].as_py() for name in key)
        block = Block.of(some, known.sort_by("sequence"))
        block.apply_all(some)
        return block.rows(subject, group, part, folded_to)

    return pieces.groupBy(*key).cogroup(old.groupBy(*key)).applyInArrow(apply, DELIVERIES.ddl())


def _in_parts(parts: set[int] | frozenset[int]) -> str:
    return f"part IN ({', '.join(map(str, sorted(parts))) or 'NULL'})"


def group_name(subject: str, group: str) -> str:
    """One name for a subject and a group."""
    return f"{subject}{BREAK}{group}"


def group_spans(marks: Marks) -> dict[str, tuple[int, int]]:
    """Subject and group → first sequence for the group, and the one after the last."""
    return {
        name: (mark["first"], mark["come_to"] if mark["has_ended"] else ENDLESS)
        for name, mark in marks.items()
        if mark["first"] is not None
    }


def groups(spark: SparkSession, marks: Marks) -> DataFrame:
    """The groups as a table: subject, group, the sequences for it, and its filter."""
    rows = []
    for name, (first, after) in group_spans(marks).items():
        subject, group = name.split(BREAK)
        mark = marks[name]
        tags = None if mark["was_refiltered"] else mark["filter"]
        any_tags, all_tags = (None, None) if tags is None else tags
        rows.append((subject, group, first, after, any_tags, all_tags))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * len(_GROUPS)
    return arrow_frame(spark, pa.table(columns, schema=_GROUPS))
