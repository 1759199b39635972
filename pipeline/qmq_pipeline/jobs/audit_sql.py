"""The queries of the audit, on the views of `audit.make_views`.

Committed and stored messages are compared in one pass: all facts about a message are joined by its
id into one row, and each kind of finding is a condition on that row. The outcomes of groups are
joined with it. Every query returns the columns of `audit_findings`, without the run. Evidence is
one sentence with the observed values.
"""

from __future__ import annotations

from typing import Final

from qmq_pipeline.fold.steps import BY_FORCE, NEVER_GIVEN, SOUGHT

#: Each message's newest row. A row that was open at an earlier scan and is missing in the last scan is gone.
OUTBOX_NOW: Final = """
SELECT o.*, o.state <> 'sent' AND COALESCE(unix_millis(o.scanned_at) < s.last_scan_ms, FALSE) AS is_gone
FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY database, message_id ORDER BY scanned_at DESC) AS place
  FROM {outbox}
) o LEFT JOIN {scans} s USING (database) WHERE place = 1
"""

#: All facts of outboxes and log, one row for each. `is_judged`: its time is in the window.
_SAID: Final = """
SELECT message_id,
       STRUCT(NOT ({created_is_judged}) AS is_outside, created_at, database, subject, row_id, state, is_gone,
              attempts, last_error, record_crc AS crc) AS o,
       NULL AS m, NULL AS d, NULL AS cancelled_at
FROM qmq_outbox_all
UNION ALL
SELECT message_id, NULL,
       STRUCT(subject, sequence, producer, stored_at, due_at, record_crc AS crc, found_crc,
              {stored_is_judged} AS is_judged), NULL, NULL
FROM qmq_stored_all
UNION ALL
SELECT message_id, NULL, NULL,
       STRUCT(physical_offset, subject, stored_at, COALESCE(now_due_at, due_at) AS due_at,
              record_crc AS crc, found_crc, {stored_is_judged} AS is_judged), NULL
FROM qmq_scheduled_all
UNION ALL
SELECT message_id, NULL, NULL, NULL, stored_at FROM qmq_cancelled_all
"""
_COPY: Final = "STRUCT(m.crc, m.sequence, m.stored_at)"
#: The facts about each message: its row `o`, its copies in the log (the first one, those with the
#: least and the greatest checksum, and one whose bytes do not match its checksum), and, if it is
#: delayed, `d` with its last due time.
_MESSAGES: Final = f"""
SELECT message_id, MIN(o) AS o, MIN(m.subject) AS subject, MIN(m.producer) AS producer,
       MIN(m.sequence) AS sequence, MIN(m.stored_at) AS stored_at, MIN(m.due_at) AS due_at,
       MIN({_COPY}) FILTER (WHERE m IS NOT NULL) AS least, MAX({_COPY}) AS most,
       COUNT_IF(m.is_judged) AS copies,
       MIN(STRUCT(m.stored_at, m.sequence)) FILTER (WHERE m.is_judged) AS first,
       MAX(m.sequence) FILTER (WHERE m.is_judged) AS last_sequence,
       MIN({_COPY}) FILTER (WHERE m.is_judged) AS least_judged,
       MAX({_COPY}) FILTER (WHERE m.is_judged) AS most_judged,
       MIN(STRUCT(m.crc, m.found_crc, m.sequence, m.stored_at))
         FILTER (WHERE m.is_judged AND m.found_crc IS NOT NULL) AS spoilt,
       MIN(STRUCT(d.crc, d.found_crc, CAST(NULL AS BIGINT) AS sequence, d.stored_at))
         FILTER (WHERE d.is_judged AND d.found_crc IS NOT NULL) AS spoilt_scheduled,
       MAX(d) AS d, MIN(cancelled_at) AS cancelled_at
FROM (SELECT * FROM ({_SAID}) DISTRIBUTE BY message_id) GROUP BY message_id
"""

#: Producers whose outbox is among those that keep rows, and the time of the oldest of these rows.
KEPT: Final = """
SELECT DISTINCT producer, first_at
FROM qmq_outbox_all JOIN qmq_kept_databases USING (database)
CROSS JOIN (SELECT MIN(created_at) AS first_at FROM qmq_outbox_all JOIN qmq_kept_databases USING (database))
"""


def _found(
    kind: str,
    condition: str,
    evidence: str,
    *,
    at: str,
    subject: str = "subject",
    sequence: str = "NULL",
    database: str = "NULL",
) -> str:
    """A finding about a message if the condition holds, otherwise null."""
    return (
        f"IF({condition}, STRUCT('{kind}' AS kind, {subject} AS subject, "
        f"CAST({database} AS STRING) AS database, CAST({sequence} AS BIGINT) AS sequence, {at} AS at, "
        f"CONCAT({evidence}) AS evidence), NULL)"
    )


def _crc(column: str) -> str:
    return f"LOWER(HEX({column}))"


def _altered_row(stored: str, sequence: str) -> str:
    """A message whose outbox row has another checksum than the stored record."""
    return _found(
        "altered",
        f"{_IS_COMMITTED} AND o.crc <> {stored}.crc",
        f"'its row has checksum ', {_crc('o.crc')}, ', what is stored as sequence ', "
        f"COALESCE(CAST({sequence} AS STRING), 'to come'), ' has ', {_crc(f'{stored}.crc')}",
        at=f"{stored}.stored_at",
        subject="COALESCE(subject, d.subject)",
        sequence=sequence,
        database="o.database",
    )


def _altered_release(copy: str) -> str:
    """A delayed message that was released with another checksum than it was scheduled with."""
    return _found(
        "altered",
        f"d.crc <> {copy}.crc",
        f"'scheduled with checksum ', {_crc('d.crc')}, ', released as sequence ', {copy}.sequence, "
        f"' with ', {_crc(f'{copy}.crc')}",
        at=f"{copy}.stored_at",
        sequence=f"{copy}.sequence",
    )


def _altered_content(spoilt: str) -> str:
    """A record whose bytes in the log do not match the checksum in front of them."""
    return _found(
        "altered",
        f"{spoilt} IS NOT NULL",
        f"'its producer made checksum ', {_crc(f'{spoilt}.crc')}, ', what is stored as sequence ', "
        f"COALESCE(CAST({spoilt}.sequence AS STRING), 'to come'), ' has ', {_crc(f'{spoilt}.found_crc')}",
        at=f"{spoilt}.stored_at",
        subject="COALESCE(subject, d.subject)",
        sequence=f"{spoilt}.sequence",
    )


_IS_COMMITTED: Final = "NOT COALESCE(o.is_outside, TRUE)"
_IS_ABSENT: Final = "stored_at IS NULL AND d IS NULL"
_ROW: Final = "'row ', o.row_id, ' of ', o.database"
_LOST: Final = _found(
    "lost",
    f"{_IS_COMMITTED} AND {_IS_ABSENT} AND cancelled_at IS NULL AND (o.state = 'sent' OR o.is_gone)",
    f"{_ROW}, CASE WHEN o.is_gone THEN CONCAT(' was ', o.state, ' and is gone') ELSE ' is sent' END, "
    "', committed ', CAST(o.created_at AS STRING), '; the log does not have it'",
    at="o.created_at",
    subject="o.subject",
    database="o.database",
)
_WAITING: Final = _found(
    "late",
    f"{_IS_COMMITTED} AND {_IS_ABSENT} AND o.state <> 'sent' AND NOT o.is_gone "
    "AND {next_us} - unix_micros(o.created_at) > {late_us}",
    f"{_ROW}, ' is ', o.state, ' since ', CAST(o.created_at AS STRING), ', after ', o.attempts, "
    "' attempts', COALESCE(CONCAT(': ', o.last_error), '')",
    at="o.created_at",
    subject="o.subject",
    database="o.database",
)
#: The due time is the last one if the message was rescheduled.
_WANTED_AT: Final = "GREATEST(o.created_at, COALESCE(d.due_at, due_at))"
_LATE: Final = _found(
    "late",
    f"{_IS_COMMITTED} AND unix_micros(stored_at) - unix_micros({_WANTED_AT}) > {{late_us}}",
    "'stored ', CAST(stored_at AS STRING), ', ', "
    f"ROUND((unix_micros(stored_at) - unix_micros({_WANTED_AT})) / 1e6D, 3), ' s after ', "
    f"IF({_WANTED_AT} > o.created_at, 'it was due', 'its row was inserted')",
    at="o.created_at",
    sequence="sequence",
    database="o.database",
)
#: A delayed message that is long overdue and not in its subject yet.
_OVERDUE: Final = _found(
    "late",
    "d IS NOT NULL AND stored_at IS NULL AND cancelled_at IS NULL "
    "AND {next_us} - unix_micros(d.due_at) > {late_us} AND {due_is_judged}",
    "'scheduled ', CAST(d.stored_at AS STRING), ', due ', CAST(d.due_at AS STRING), "
    "'; neither in its subject nor cancelled'",
    at="d.stored_at",
    subject="d.subject",
)
_STORED: Final = "'stored ', CAST(first.stored_at AS STRING), ' as sequence ', first.sequence"
#: A delayed message that was cancelled but is in its subject.
_CANCELLED_AND_STORED: Final = _found(
    "ghost",
    "cancelled_at IS NOT NULL AND copies > 0",
    f"{_STORED}, '; it was cancelled ', CAST(cancelled_at AS STRING)",
    at="first.stored_at",
    sequence="first.sequence",
)
_GHOST: Final = _found(
    "ghost",
    "o IS NULL AND copies > 0 AND {is_ghost}",
    f"{_STORED}, '; no outbox has or had a row of it'",
    at="first.stored_at",
    sequence="first.sequence",
)
_DUPLICATE: Final = _found(
    "duplicate",
    "copies > 1",
    "'stored ', copies, ' times: first as sequence ', first.sequence, ', last as ', last_sequence",
    at="first.stored_at",
    sequence="first.sequence",
)
_ALTERED_COPY: Final = _found(
    "altered",
    "least_judged.crc <> most_judged.crc",
    "'stored ', copies, ' times with different contents'",
    at="first.stored_at",
    sequence="first.sequence",
)
#: A message has at most one finding of each kind: the first one whose condition holds.
_KINDS: Final = (
    (_LOST,),
    (_WAITING, _LATE, _OVERDUE),
    (_CANCELLED_AND_STORED, _GHOST),
    (_DUPLICATE,),
    (
        *(_altered_row(one, f"{one}.sequence") for one in ("least", "most")),
        _altered_row("d", "NULL"),
        _ALTERED_COPY,
        *(_altered_release(one) for one in ("least_judged", "most_judged")),
        *(_altered_content(one) for one in ("spoilt", "spoilt_scheduled")),
    ),
)
#: Findings from outboxes and log alone: {is_ghost} says whether a missing row proves that there never was one.
OF_MESSAGES: Final = f"""
SELECT message_id, CAST(NULL AS STRING) AS consumer_group, INLINE(found) FROM (
  SELECT message_id, FILTER(ARRAY({", ".join(f"COALESCE({', '.join(some)})" for some in _KINDS)}),
                            one -> one IS NOT NULL) AS found
  FROM ({_MESSAGES}) LEFT JOIN (SELECT producer AS kept_producer, first_at AS kept_from FROM qmq_kept)
    ON producer = kept_producer
)
"""
#: A missing row is a finding only for producers whose outboxes keep rows, and from the oldest of these rows on.
IS_MISSED: Final = "first.stored_at >= kept_from"

#: Long retries and their copies; the id of the last long retry identifies its copy.
_LONG_RETRIES: Final = """
WITH tickets AS (
  SELECT subject, consumer_group, EXPLODE(SEQUENCE(first_sequence, next_sequence - 1)) AS sequence,
         CAST(GET_JSON_OBJECT(action_json, '$[6]') AS BIGINT) AS ticket, action_offset, action_number
  FROM qmq_actions WHERE action = 'setaside' AND next_sequence > first_sequence
), last_ticket AS (
  SELECT subject, consumer_group, sequence,
         MAX_BY(ticket, STRUCT(action_offset, action_number)) AS ticket
  FROM tickets GROUP BY subject, consumer_group, sequence
), copies AS (
  SELECT ticket, subject, consumer_group, sequence, MIN(due_at) AS due_at,
         MIN(stored_at) FILTER (WHERE copy_sequence IS NOT NULL) AS back_at
  FROM qmq_copy_all GROUP BY ticket, subject, consumer_group, sequence
)
SELECT m.message_id, d.subject, d.consumer_group, d.sequence, d.long_retry_at AS at,
       c.ticket IS NOT NULL AS has_copy, c.due_at, c.back_at
FROM qmq_deliveries d
JOIN last_ticket t
  ON t.subject = d.subject AND t.consumer_group = d.consumer_group AND t.sequence = d.sequence
JOIN qmq_stored_all m ON m.subject = d.subject AND m.sequence = d.sequence
LEFT JOIN copies c ON c.subject = d.subject AND c.consumer_group = d.consumer_group
  AND c.sequence = d.sequence AND c.ticket = t.ticket
WHERE d.outcome = 'long retry' AND {retry_is_judged}
"""

#: A long retry delivers only the copy.
RETRY_LOST: Final = f"""
SELECT 'lost' AS kind, message_id, subject, consumer_group, CAST(NULL AS STRING) AS database,
       sequence, at,
       CONCAT('the group put it off ', CAST(at AS STRING), CASE
         WHEN has_copy THEN CONCAT('; its copy came back ', CAST(back_at AS STRING),
           ', and the group did not get it')
         ELSE '; the log does not have its copy' END) AS evidence
FROM ({_LONG_RETRIES}) WHERE NOT has_copy OR {{next_us}} > unix_micros(back_at)
"""
RETRY_OVERDUE: Final = f"""
SELECT 'late' AS kind, message_id, subject, consumer_group, CAST(NULL AS STRING) AS database,
       sequence, at,
       CONCAT('the group put it off ', CAST(at AS STRING), ' until ', CAST(due_at AS STRING),
         '; its copy has not come back') AS evidence
FROM ({_LONG_RETRIES})
WHERE has_copy AND back_at IS NULL AND {{next_us}} - unix_micros(due_at) > {{late_us}}
"""

#: A message for a group whose cursor is beyond it although the group never got it. A group with a
#: filter may skip messages that do not match; a skipped match is a finding.
SKIPPED: Final = f"""
SELECT 'skipped' AS kind, m.message_id, d.subject, d.consumer_group, CAST(NULL AS STRING) AS database,
       d.sequence, m.stored_at AS at,
       CONCAT('the group ', CASE
         WHEN d.outcome = 'skipped' THEN d.reason
         ELSE CONCAT('came past it although its tags match: ', ARRAY_JOIN(m.tags, ', ')) END,
         COALESCE(CONCAT(', ', CAST(d.settled_at AS STRING)), '')) AS evidence
FROM qmq_deliveries d
JOIN qmq_stored m ON m.subject = d.subject AND m.sequence = d.sequence
JOIN qmq_groups g ON g.subject = d.subject AND g.consumer_group = d.consumer_group
  AND d.sequence >= g.group_first AND d.sequence < g.group_next
WHERE (d.outcome = 'skipped' AND d.first_delivered_at IS NULL
       AND d.reason IN ('{NEVER_GIVEN}', '{BY_FORCE}', '{SOUGHT}'))
   OR (d.outcome = 'filtered' AND g.any_tags IS NOT NULL
       AND (SIZE(g.any_tags) = 0 OR ARRAYS_OVERLAP(m.tags, g.any_tags))
       AND SIZE(ARRAY_EXCEPT(g.all_tags, m.tags)) = 0)
"""

#: Findings that need the action log to its end.
OF_GROUPS: Final = (RETRY_LOST, RETRY_OVERDUE, SKIPPED)

#: The totals of compared messages.
TOTALS: Final = """
SELECT SUM(committed) AS committed, SUM(stored) AS stored, SUM(foreign_messages) AS foreign_messages,
       SUM(expected) AS expected, SUM(delivered) AS delivered, SUM(settled) AS settled
FROM (
  SELECT COUNT(*) AS committed, 0 AS stored, 0 AS foreign_messages, 0 AS expected, 0 AS delivered,
         0 AS settled
  FROM qmq_committed
  UNION ALL
  SELECT 0, SUM(m.stored), SUM(m.stored) FILTER (WHERE known.producer IS NULL), 0, 0, 0
  FROM (SELECT producer, COUNT(*) AS stored FROM qmq_stored GROUP BY producer) m
  LEFT JOIN (SELECT DISTINCT producer FROM qmq_outbox_all) known ON known.producer = m.producer
  UNION ALL
  SELECT 0, 0, 0, COUNT(*), 0, 0
  FROM qmq_stored_all m JOIN qmq_groups g
    ON g.subject = m.subject AND m.sequence >= g.group_first AND m.sequence < g.group_next
  UNION ALL
  SELECT 0, 0, 0, 0, COUNT(first_delivered_at), COUNT(settled_at) FROM qmq_deliveries
)
"""
