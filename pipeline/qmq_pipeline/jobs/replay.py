"""`qmq pipeline replay`: sends messages from the tables again, to another subject or to a group.

To a subject they are sent as new messages, with a header that names the original. Their ids are made of the replay's
name and the old id, so a repeated replay with the same name stores nothing twice within the
broker's dedupe window, and neither does a batch that is sent again because its answer was lost.
With `with_same_ids` the broker treats them as repeats of the originals while it remembers those.

To a group only dead letters can be replayed: the broker delivers them again to that group alone.

Without a confirmation nothing is sent; the result only shows what would be sent.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from qmq_client.commands.broker_json import post_json
from qmq_client.errors import BrokerBusyError, BrokerRefusedError, BrokerUnreachableError
from qmq_client.transport.http import HttpTransport
from qmq_client.wire.frame import build_message_frame
from qmq_client.wire.message_id import dedupe_message_id, parse_message_id
from qmq_client.wire.names import is_name
from qmq_client.wire.record import BodyKind, Record, encode_record
from qmq_pipeline.errors import OptionError
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.deliveries import BREAK
from qmq_pipeline.jobs.lifecycle import JOB as LIFECYCLE_JOB
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import Place
from qmq_pipeline.places.outage import AwayError, Outage, is_about_trust
from qmq_pipeline.places.places import with_token
from qmq_pipeline.tables.schemas import LIFECYCLE, LOG
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from qmq_client.wire.requests import SendAnswer

#: Header of a replayed message: the id of the original.
REPLAY_HEADER: Final = "qmq-replay-of"
#: Messages of one request: few enough not to delay other senders.
BATCH_RECORDS: Final = 500
BATCH_BYTES: Final = 1024 * 1024
#: Messages of one replay, unless a larger limit is given.
LIMIT: Final = 10_000
_EXAMPLES: Final = 5
#: Most groups that an error names.
_GROUPS_SHOWN_MAX: Final = 20
#: The broker's error code for an id that is stored with other content.
_ID_CONFLICT: Final = "id_conflict"
_DEAD: Final = "dead"
_KNOWN: Final = ("count", "has_more")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target of a replay; one of the two is set."""

    subject: str | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The selection of messages, and the target."""

    #: SQL condition on the table `lifecycle`.
    where: str
    target: Target
    #: The new ids are derived from it: the same name gives the same ids.
    name: str
    with_same_ids: bool = False
    #: A replay of more messages is refused.
    limit: int = LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result: messages that would be replayed, or were."""

    name: str
    target: Target
    messages: int
    #: Subject → number of messages.
    subjects: dict[str, int]
    #: Some of their ids.
    examples: list[str]
    sent: int = 0
    #: Messages that the broker already had.
    repeated: int = 0


def parse_target(text: str) -> Target:
    """Parse `subject:NAME` or `group:NAME`."""
    kind, _, name = text.partition(":")
    if kind == "subject" and is_name(name):
        return Target(subject=name)
    if kind == "group" and name:
        return Target(group=name)
    raise OptionError(
        option="--to",
        value=text,
        allowed="subject:NAME or group:NAME",
        remedy="Name the group that gets its dead letters again, or the subject that gets copies of messages.",
    )


def replay(
    spark: SparkSession,
    config: PipelineConfig,
    order: Order,
    *,
    is_sending: bool = False,
    on_progress: OnProgress = no_progress,
) -> Replay:
    """Find the messages of the order, and send them if the order says so.

    Raises `OptionError`, before anything is sent, for a group that the tables do not know, if there
    are more than the limit, or if no broker is given. A replay that was interrupted can be repeated
    under its name.
    """
    tables = tables_of(spark, config)
    tables.require()
    if order.target.group is not None:
        _check_group(tables, order.target.group)
    chosen = _chosen(tables, order).cache()
    try:
        counts = chosen.groupBy("subject").count().collect()
        subjects = {row["subject"]: int(row["count"]) for row in counts}
        some = chosen.select("message_id").limit(_EXAMPLES).collect()
        found = Replay(
            name=order.name,
            target=order.target,
            messages=sum(subjects.values()),
            subjects=subjects,
            examples=sorted(row["message_id"] for row in some),
        )
        if not is_sending or not found.messages:
            return found
        _check_limit(found.messages, order.limit)
        place = _broker(config)
        if order.target.group is not None:
            return _replay_dead(chosen, place, found)
        messages = tables.read(LOG).where("kind = 'message'")
        rows = messages.join(chosen, ["subject", "sequence", "message_id"], "left_semi")
        return _send(rows, place, order, found, on_progress)
    finally:
        chosen.unpersist()


def _check_group(tables: Tables, group: str) -> None:
    marks = tables.progress(LIFECYCLE_JOB).get("marks", {})
    known = sorted({name.partition(BREAK)[2] for name in marks})
    if group in known:
        return
    near = difflib.get_close_matches(group, known, n=1)
    shown = ", ".join([*known[:_GROUPS_SHOWN_MAX], *(["…"] if known[_GROUPS_SHOWN_MAX:] else [])])
    raise OptionError(
        option="--to",
        value=f"the tables know no group {group}",
        allowed=shown or "a group whose deliveries are in the tables, and none are",
        remedy=f"Did you mean {near[0]}?"
        if near
        else "If it is new, run `ingest` and `lifecycle` first.",
    )


def _chosen(tables: Tables, order: Order) -> DataFrame:
    """The messages, each once."""
    from pyspark.errors import AnalysisException

    target = order.target
    try:
        rows = tables.read(LIFECYCLE).where(order.where).where("sequence IS NOT NULL")
        _ = rows.schema  # Spark Connect analyses the condition only now
    except AnalysisException as error:
        raise OptionError(
            option="--where",
            value=f"{order.where}: {(str(error).strip().splitlines() or ['not understood'])[0]}",
            allowed="a condition in SQL on the columns of lifecycle",
            remedy=f"Columns are {', '.join(LIFECYCLE.names)}.",
        ) from error
    if target.group is not None:
        rows = rows.where(rows.outcome == _DEAD).where(rows.consumer_group == target.group)
    return rows.select("subject", "sequence", "message_id").distinct()


def _send(
    rows: DataFrame, place: Place, order: Order, found: Replay, on_progress: OnProgress
) -> Replay:
    subject = found.target.subject or ""
    remedy = f"Repeat it with --name {order.name}: messages that were sent are not sent again"
    transport = HttpTransport(place.address)
    sent = repeated = 0
    try:
        for records in _batches(_records(rows, subject, order)):
            send = partial(_accepted, transport, build_message_frame({subject: records}))
            answer = _outlasting(place, send, remedy)
            sent += len(records)
            repeated += answer.duplicates
            on_progress(Progress(stage="replay", done=sent, total=found.messages, rows=sent))
    finally:
        transport.close()
    return changed(found, sent=sent - repeated, repeated=repeated)


def _outlasting(place: Place, call: Callable[[], _Result], remedy: str) -> _Result:
    """The answer to a repeatable call; waits while the broker is unreachable."""

    def answer() -> _Result:
        try:
            return call()
        except (BrokerUnreachableError, BrokerBusyError) as error:
            if is_about_trust(error):
                raise
            raise AwayError(str(error).rstrip(".")) from error

    return Outage(place.name, place.wait_s).outlast(answer, remedy=remedy)


def _accepted(transport: HttpTransport, frame: bytes) -> SendAnswer:
    try:
        return transport.send(frame)
    except BrokerRefusedError as error:
        if error.answer.code != _ID_CONFLICT:
            raise
        raise OptionError(
            option="--same-ids",
            value=f"the broker has message {error.answer.message_id} already, with other content",
            allowed="messages that it has forgotten, or has with the same content",
            remedy="Leave --same-ids out: then the copies get new ids.",
        ) from error


def _records(rows: DataFrame, subject: str, order: Order) -> Iterator[bytes]:
    times_ms = [f"unix_millis({name}) AS {name}_ms" for name in ("born_at", "due_at", "expires_at")]
    in_order = rows.selectExpr("*", *times_ms).orderBy(
        "stored_at", "physical_offset", "record_number"
    )
    for row in in_order.toLocalIterator():
        original = Record(
            message_id=parse_message_id(row["message_id"]),
            subject=subject,
            body=bytes(row["body"]),
            body_kind=BodyKind(max(row["body_kind"], 0)),
            key=row["key"],
            tags=tuple(row["tags"]),
            headers=tuple((row["headers"] or {}).items()),
            # The original's time: the same replay makes the same bytes and is recognized as a repeat.
            born_at_ms=row["born_at_ms"],
        )
        if order.with_same_ids:
            # Equal in every byte: otherwise the broker would refuse the repeated id.
            same = structs.replace(
                original, due_at_ms=row["due_at_ms"], expires_at_ms=row["expires_at_ms"]
            )
            yield encode_record(same)
            continue
        old_id = row["message_id"]
        headers = {**(row["headers"] or {}), REPLAY_HEADER: old_id}
        new_id = dedupe_message_id(subject, f"replay/{order.name}/{old_id}")
        yield encode_record(
            structs.replace(original, message_id=new_id, headers=tuple(headers.items()))
        )


def _batches(records: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size_bytes = 0
    for record in records:
        if batch and (len(batch) == BATCH_RECORDS or size_bytes + len(record) > BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(record)
        size_bytes += len(record)
    if batch:
        yield batch


def _replay_dead(chosen: DataFrame, place: Place, found: Replay) -> Replay:
    """Ask the broker to deliver dead letters again, range by range."""
    sent = 0
    for subject in sorted(found.subjects):
        rows = chosen.where(chosen.subject == subject).select("sequence").collect()
        for first, after in runs(sorted(row["sequence"] for row in rows)):
            question = {
                "subject": subject,
                "group": found.target.group,
                "first": first,
                "next": after,
            }
            answer: dict[str, Any] = {"has_more": True}
            while answer["has_more"]:  # the broker limits the work of one request
                ask = partial(post_json, place.address, "/v1/dead/replay", question, known=_KNOWN)
                answer = _outlasting(
                    place, ask, "Repeat it: messages that were replayed are no longer dead letters"
                )
                sent += int(answer["count"])
    return changed(found, sent=sent)


def runs(sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as half-open ranges."""
    found: list[tuple[int, int]] = []
    for number in sequences:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def _check_limit(messages: int, limit: int) -> None:
    if messages > limit:
        raise OptionError(
            option="--limit",
            value=f"{messages} messages are chosen",
            allowed=f"{limit}",
            remedy="Narrow --where, or give a higher --limit.",
        )


def _broker(config: PipelineConfig) -> Place:
    if config.place is None or config.place.broker_url is None:
        raise OptionError(
            option="--broker",
            value="not given",
            allowed="the address of a running broker",
            remedy="Give the broker that the replay is sent to.",
        )
    return with_token(config.place, os.environ)
