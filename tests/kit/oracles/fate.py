"""Is what was committed there, and nothing else: LOST, GHOST, ALIEN, ALTERED, EFFECT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.kit.events import Accepted, Attempt, Delivered, Effect, Event, Stored, Truth, Unknown
from tests.kit.expectations import Group
from tests.kit.ledger import Fate, Ledger, Sent, Sighting, grouped
from tests.kit.verdict import Findings, Oracle


def unsettled(ledger: Ledger, findings: Findings) -> None:
    """HISTORY: every transaction must be settled, or its messages cannot be judged."""
    begun = {event.transaction_id: event for event in ledger.of(Attempt) if event.transaction_id}
    asked: dict[str, Event] = {**begun, **{e.transaction_id: e for e in ledger.of(Unknown)}}
    for transaction_id, event in asked.items():
        if ledger.outcome(transaction_id) is Fate.UNSETTLED:
            findings.add(
                Oracle.HISTORY,
                f"transaction {transaction_id} has neither an outcome nor a truth",
                evidence=(event,),
            )


def contradicted(ledger: Ledger, findings: Findings) -> None:
    """LOST, GHOST: the business table must say what the application was told."""
    for transaction_id, truth in ledger.truth.items():
        commit = ledger.committed_at.get(transaction_id)
        rollback = ledger.rolled_back_at.get(transaction_id)
        if commit is not None and not truth.is_committed:
            _contradiction(findings, Oracle.LOST, "committed", truth, commit)
        if rollback is not None and truth.is_committed:
            _contradiction(findings, Oracle.GHOST, "rolled back", truth, rollback)


def _contradiction(
    findings: Findings, oracle: Oracle, told: str, truth: Truth, answer: Event
) -> None:
    findings.add(
        oracle,
        f"the application saw transaction {truth.transaction_id} {told}, "
        "the business table says otherwise",
        evidence=(answer, truth),
        promises=("S1",),
    )


def lost(ledger: Ledger, findings: Findings) -> None:
    """LOST: every owed message is in the log and was delivered to each group or is its dead letter.

    What the log lost is found there and not once more in every group.
    """
    by_subject = grouped_by_subject(ledger.owed)
    is_log_read = bool(ledger.stored) or not ledger.groups
    for subject, owed in by_subject.items():
        if is_log_read:
            stage = _Stage(findings, f"the log of {subject}", ("O1", "B1", "B3"))
            stage.judge(owed, lambda message_id: message_id in ledger.stored)
    for name, group in ledger.groups.items():
        for subject in sorted(group.subjects & by_subject.keys()):
            kept = [
                sent
                for sent in by_subject[subject]
                if not is_log_read or sent.attempt.message_id in ledger.stored
            ]
            stage = _Stage(findings, f"group {name} on {subject}", ("O1", "B3", "C1"))
            stage.judge(kept, _is_served(ledger, name))


def grouped_by_subject(messages: Iterable[Sent]) -> dict[str, list[Sent]]:
    """The messages by subject, in their order."""
    by_subject: dict[str, list[Sent]] = {}
    for sent in messages:
        by_subject.setdefault(sent.attempt.subject, []).append(sent)
    return by_subject


def _is_served(ledger: Ledger, group: str) -> Callable[[str], bool]:
    return lambda message_id: (
        (group, message_id) in ledger.deliveries or (group, message_id) in ledger.dead
    )


class _Stage:
    """One place where every owed message must be found.

    Lost ones are told apart by where they stood among those found, for each has another cause:
    *prefix* a wrong start position or retention, *middle* a hole, *tail* a cut end.
    """

    def __init__(self, findings: Findings, place: str, promises: tuple[str, ...]) -> None:
        self._findings = findings
        self._place = place
        self._promises = promises

    def judge(self, owed: Sequence[Sent], is_found: Callable[[str], bool]) -> None:
        """Report every owed message that is not found."""
        found = [is_found(sent.attempt.message_id) for sent in owed]
        if all(found):
            return
        positions = [i for i, was_found in enumerate(found) if was_found]
        first, last = (positions[0], positions[-1]) if positions else (len(found), len(found))
        for i, was_found in enumerate(found):
            if not was_found:
                part = "prefix" if i < first else "tail" if i > last else "middle"
                self._report(owed[i], part)

    def _report(self, sent: Sent, part: str) -> None:
        message_id = sent.attempt.message_id
        self._findings.counts["lost"] += 1
        self._findings.counts[f"lost_{part}"] += 1
        self._findings.add(
            Oracle.LOST,
            f"committed message {message_id} is missing in {self._place} ({part})",
            message_ids=(message_id,),
            evidence=sent.attempts,
            promises=self._promises,
        )


def ghost(ledger: Ledger, findings: Findings) -> None:
    """GHOST: nothing of an undone transaction is ever seen outside."""
    undone = {i: sent for i, sent in ledger.sent.items() if sent.fate is Fate.UNDONE}
    if not undone:
        return
    seen = (event for event in _outside(ledger) if event.message_id in undone)
    for message_id, events in grouped(seen, lambda event: event.message_id).items():
        findings.add(
            Oracle.GHOST,
            f"message {message_id} of a rolled back transaction was seen {len(events)} times",
            message_ids=(message_id,),
            evidence=(undone[message_id].attempt, *events),
        )


def alien(ledger: Ledger, findings: Findings) -> None:
    """ALIEN: only what was sent is seen, on the subject it was sent to, in groups that asked."""
    sent = ledger.sent
    groups = ledger.groups
    strange: dict[str, list[Event]] = {}
    for event in _outside(ledger):
        known = sent.get(event.message_id)
        subject = None if known is None else known.attempt.subject
        if subject is None or not _is_at_home(event, subject, groups.get):
            strange.setdefault(event.message_id, []).append(event)
    for message_id, events in strange.items():
        known = sent.get(message_id)
        where = "but never sent" if known is None else "where it does not belong"
        findings.add(
            Oracle.ALIEN,
            f"message {message_id} was seen {where}",
            message_ids=(message_id,),
            evidence=(*(known.attempts if known else ()), *events),
        )


def _outside(ledger: Ledger) -> list[Sighting | Effect]:
    return [*ledger.sightings, *ledger.of(Effect)]


def _is_at_home(
    event: Sighting | Effect, subject: str, group_of: Callable[[str], Group | None]
) -> bool:
    if not isinstance(event, Effect) and event.subject != subject:
        return False
    if isinstance(event, Accepted | Stored):
        return True
    group = group_of(event.group)
    return group is not None and subject in group.subjects


def altered(ledger: Ledger, findings: Findings) -> None:
    """ALTERED: the bytes in the log and at the handler are the bytes that were sent."""
    sent = ledger.sent
    for event in ledger.sightings:
        known = sent.get(event.message_id)
        if isinstance(event, Accepted) or known is None or not event.body_hash:
            continue
        if event.body_hash == known.attempt.body_hash:
            continue
        findings.add(
            Oracle.ALTERED,
            f"message {event.message_id} was sent as {known.attempt.body_hash} "
            f"and {_place(event)} as {event.body_hash}",
            message_ids=(event.message_id,),
            evidence=(known.attempt, event),
        )


def _place(event: Stored | Delivered) -> str:
    return "stored" if isinstance(event, Stored) else f"delivered to {event.consumer}"


def effect(ledger: Ledger, findings: Findings) -> None:
    """EFFECT: one row per owed message in each group that writes rows.

    A message never delivered is LOST, not this; a dead letter may have left one row or none.
    """
    for name, group in ledger.groups.items():
        if group.has_effects:
            for sent in ledger.owed:
                if sent.attempt.subject in group.subjects:
                    _effect_of(ledger, findings, name, sent.attempt.message_id)


def _effect_of(ledger: Ledger, findings: Findings, group: str, message_id: str) -> None:
    rows = ledger.effects.get((group, message_id), ())
    times = sum(row.times for row in rows)
    deliveries = ledger.deliveries.get((group, message_id), ())
    is_missing = times == 0 and bool(deliveries) and (group, message_id) not in ledger.dead
    if times <= 1 and not is_missing:
        return
    findings.counts["effects_doubled" if times else "effects_missing"] += 1
    findings.add(
        Oracle.EFFECT,
        f"message {message_id} has {times} effects in group {group}",
        message_ids=(message_id,),
        evidence=(*deliveries, *rows),
    )
