"""Is the broker's log sound: DUPLOG and OFFSET."""

from __future__ import annotations

from itertools import pairwise

from tests.kit.events import SEQUENCE_UNKNOWN, Stored
from tests.kit.excuses import CRASHES, SILENCES
from tests.kit.ledger import Ledger, Sighting
from tests.kit.verdict import Findings, Oracle


def stored_twice(ledger: Ledger, findings: Findings) -> None:
    """DUPLOG: one entry per id within the dedupe window; beyond it each further one is excused."""
    doubled = {i: entries for i, entries in ledger.stored.items() if len(entries) > 1}
    if not doubled:
        return
    by_offset = sorted(ledger.of(Stored), key=lambda entry: entry.offset)
    place = {(e.subject, e.sequence): place for place, e in enumerate(by_offset)}
    window = ledger.promises.dedupe_window_messages
    for message_id, entries in doubled.items():
        ordered = sorted(entries, key=lambda entry: entry.offset)
        places = [place[entry.subject, entry.sequence] for entry in ordered]
        is_outside = window is not None and all(b - a > window for a, b in pairwise(places))
        if is_outside and len(entries) - 1 <= _second_senders(ledger, message_id):
            findings.counts["stored_again_outside_window"] += len(entries) - 1
            continue
        findings.add(
            Oracle.DUPLOG,
            f"message {message_id} is stored {len(entries)} times",
            message_ids=(message_id,),
            evidence=tuple(ordered),
        )


def _second_senders(ledger: Ledger, message_id: str) -> int:
    """How often this message may have come again: takeovers of its row, crashes, silences, the network."""
    writes = ledger.owner_writes.get(message_id, ())
    takeovers = sum(write.action == "claim" and write.changed_rows > 0 for write in writes)
    faults = sum(span.kind in CRASHES | SILENCES for span in ledger.faults.spans)
    return takeovers + faults + ledger.promises.doubled_requests


def sequences(ledger: Ledger, findings: Findings) -> None:
    """OFFSET: a sequence means one message for ever, has no holes and grows with the offset."""
    _immutable(ledger, findings)
    _moved(ledger, findings)
    _dense(ledger, findings)


def _immutable(ledger: Ledger, findings: Findings) -> None:
    holder: dict[tuple[str, int], Sighting] = {}
    accused: set[tuple[str, int]] = set()
    for event in ledger.sightings:
        where = (event.subject, event.sequence)
        if event.sequence == SEQUENCE_UNKNOWN:
            continue
        first = holder.setdefault(where, event)
        if first.message_id != event.message_id and where not in accused:
            accused.add(where)
            findings.add(
                Oracle.OFFSET,
                f"sequence {event.sequence} of {event.subject} was {first.message_id} "
                f"and {event.message_id}",
                message_ids=(first.message_id, event.message_id),
                evidence=(first, event),
            )


def _moved(ledger: Ledger, findings: Findings) -> None:
    """A message seen at a sequence must be found there at the end, if the log has it at all."""
    at_home = {(e.subject, e.sequence) for e in ledger.of(Stored)}
    accused: set[str] = set()
    for event in ledger.sightings:
        entries = ledger.stored.get(event.message_id)
        if entries is None or event.sequence == SEQUENCE_UNKNOWN or event.message_id in accused:
            continue
        if event.subject == entries[0].subject and (event.subject, event.sequence) not in at_home:
            accused.add(event.message_id)
            findings.add(
                Oracle.OFFSET,
                f"message {event.message_id} was seen at sequence {event.sequence} of "
                f"{event.subject}, where the log has nothing",
                message_ids=(event.message_id,),
                evidence=(event, *entries),
            )


def _dense(ledger: Ledger, findings: Findings) -> None:
    by_subject: dict[str, dict[int, Stored]] = {}
    for entry in ledger.of(Stored):
        by_subject.setdefault(entry.subject, {})[entry.sequence] = entry
    for subject, entries in by_subject.items():
        for low, high in pairwise(sorted(entries)):
            before, after = entries[low], entries[high]
            if high != low + 1:
                problem = f"sequences {low + 1} to {high - 1} of {subject} are missing"
            elif before.offset >= after.offset:
                problem = f"sequences {low} and {high} of {subject} are not in append order"
            else:
                continue
            findings.add(
                Oracle.OFFSET,
                problem,
                message_ids=(before.message_id, after.message_id),
                evidence=(before, after),
            )
