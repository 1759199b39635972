"""The outbox store: claims, settles, lists, retries and purges rows.

The publisher uses it for rows of its own process, the watchdog for rows that were left behind. Any
number of both may work at once: every change names the row *and* its token, so an owner whose lease
has ended changes nothing. Rows are found by state and due time only. Each method is one short
transaction on the store's own pool, never on the application's, and uses only the database's clock.

A command that changes all chosen rows does so in several short transactions. Meanwhile the next
sweep may park a retried row again. So each row is visited only once: in the order of row numbers,
up to the highest number at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Final, TypeVar

import sqlalchemy as sa

from qmq_client.outbox.checking.rights import PRODUCER, Role
from qmq_client.outbox.checking.schema import Faults, faults_of, missing_error
from qmq_client.outbox.committed.deletes import chunks, listed
from qmq_client.outbox.committed.settling import Settling
from qmq_client.outbox.committed.waiting import fill_order_locks, waiting_ids
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX, ClaimTerms
from qmq_client.outbox.database.deadlock import repeat_when_undone
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.own_connections import OwnConnections
from qmq_client.outbox.database.table_names import in_own_schema, table_sql
from qmq_client.outbox.row import (
    ALL_ROWS,
    ROW_FILTER_IDS_MAX,
    BatchOutcome,
    FoundRow,
    OutboxCounts,
    OutboxRow,
    RowFilter,
    StoredRow,
)
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, PARKED, SENT, Tables


def stored_rows(outbox: sa.Table) -> sa.Select[Any]:
    """A query for the columns of `StoredRow`, ordered by state, then by due time."""
    columns = outbox.c
    return sa.select(
        # Read as bytes, so that a damaged id does not hide the other rows.
        sa.cast(columns.message_id, sa.LargeBinary()).label("message_id"),
        columns.subject,
        columns.ordering_key,
        columns.state,
        columns.attempts,
        columns.last_error,
        columns.created_at_ms,
        columns.due_at_ms,
        columns.token.is_not(None).label("is_owned"),
        sa.func.length(columns.record).label("record_bytes"),
    ).order_by(columns.state, columns.due_at_ms)


def conditions(
    outbox: sa.Table,
    now_ms: sa.ColumnElement[int],
    chosen: RowFilter,
    *,
    state: int | None,
    is_due: bool,
) -> Iterator[sa.ColumnElement[bool]]:
    """The SQL conditions of this filter; rows in any state if `state` is None."""
    columns = outbox.c
    if state is not None:
        yield columns.state == state
    if is_due:
        yield columns.due_at_ms <= now_ms
    if chosen.message_ids is not None:
        yield columns.message_id.in_(chosen.message_ids[:ROW_FILTER_IDS_MAX])
    if chosen.subject:
        yield columns.subject == chosen.subject
    if chosen.error:
        yield columns.last_error.contains(chosen.error, autoescape=True)
    if chosen.older_than_ms:
        yield columns.created_at_ms <= now_ms - chosen.older_than_ms


#: Most rows that one transaction changes.
CHANGED_ROWS_MAX: Final = 10_000


def change_by_hand(
    own: OwnConnections,
    change: sa.Update | sa.Delete,
    conditions: Sequence[sa.ColumnElement[bool]],
    *,
    state: int,
    rows_max: int = CHANGED_ROWS_MAX,
) -> int:
    """Change the rows in `state` that fulfil these conditions; returns how many.

    Each transaction changes up to `rows_max` rows. Requires: `change` itself checks the state and
    other conditions, because another owner may change a row after it was chosen.
    """
    outbox: Any = change.table
    number, changed = outbox.c.id, 0
    chosen = sa.select(number).where(outbox.c.state == state, *conditions)
    greatest = chosen.with_only_columns(sa.func.max(number))
    passed, last = 0, own.read(lambda connection: connection.scalar(greatest)) or 0
    while passed < last:
        ahead = chosen.where(number > passed, number <= last).order_by(number).limit(rows_max)

        def step(
            connection: sa.Connection, ahead: sa.Select[Any] = ahead
        ) -> tuple[Sequence[int], int]:
            numbers = connection.scalars(ahead).all()
            return numbers, sum(
                connection.execute(change.where(number.in_(some))).rowcount
                for some in chunks(numbers)
            )

        numbers, count = own.write(step)
        changed += count
        passed = numbers[-1] if numbers else last
    return changed


_Result = TypeVar("_Result")

#: Rows read to find the oldest, so that the work does not grow with the outbox.
_OLDEST_AMONG_ROWS: Final = 1_000
_LISTED_ROWS_MAX: Final = 1_000
_PURGED_ROWS_MAX: Final = 10_000


class OutboxStore:
    """The outbox of one database. Safe for any number of threads.

    Errors of the database are raised as `sqlalchemy.exc.SQLAlchemyError`.
    """

    def __init__(self, engine: sa.Engine, tables: Tables = DEFAULT_TABLES) -> None:
        """Opens no connection."""
        self._dialect = dialect_of(engine)
        self._tables = tables
        self._application = engine
        self._own = OwnConnections(engine, self._dialect)
        self._now_ms: sa.ColumnElement[int] = sa.literal_column(
            self._dialect.now_ms, sa.BigInteger()
        )

    @cached_property
    def _resolved(self) -> Tables:
        """The tables with qualified names; connects, if needed, to learn the default schema."""
        dialect = self._application.dialect
        if dialect.name != "sqlite" and dialect.default_schema_name is None:
            self._own.look(lambda _: None)
        return in_own_schema(dialect, self._tables)

    @cached_property
    def _outbox(self) -> sa.Table:
        return self._resolved.outbox

    @cached_property
    def _settling(self) -> Settling:
        return Settling(self._outbox, self._now_ms, self._dialect.is_refused)

    @property
    def undeleted(self) -> int:
        """Number of rows that the database did not delete when this store first tried.

        Their messages are accepted; see `settling.py`.
        """
        return self._settling.undeleted.count if "_settling" in self.__dict__ else 0

    def claim(
        self,
        *,
        token: bytes,
        limit: int,
        lease_ms: int,
        keys: Sequence[str] = (),
        bytes_max: int = CLAIM_BYTES_MAX,
    ) -> list[OutboxRow]:
        """Take up to `limit` live rows for `token` until `lease_ms` from now.

        Takes due rows or, with `keys`, rows of these ordering keys without an owner. Ends with
        the row at which their records reach `bytes_max`.
        """

        terms = ClaimTerms(
            token=token, limit=limit, lease_ms=lease_ms, keys=keys, bytes_max=bytes_max
        )

        def claim(connection: sa.Connection) -> list[OutboxRow]:
            return self._dialect.claim(connection, self._outbox, terms)

        return self._written(claim)

    def reclaim(self, message_ids: Sequence[bytes], *, token: bytes, lease_ms: int) -> set[bytes]:
        """Extend the leases of these rows, as far as `token` still owns them; returns their ids.

        Only committed rows are found. So it also shows which rows a commit with an unknown outcome
        has stored.
        """

        def reclaim(connection: sa.Connection) -> set[bytes]:
            owned: set[bytes] = set()
            for ids in chunks(message_ids):
                owned |= self._reclaim(connection, ids, token, lease_ms)
            return owned

        return self._written(reclaim)

    def find(self, message_ids: Sequence[bytes], *, with_records: bool) -> list[FoundRow]:
        """Read the committed ones of these rows in one statement, with any owner."""
        columns = (
            "message_id, state, token, last_error, record"
            if with_records
            else ("message_id, state, token, last_error, NULL")
        )

        def find(connection: sa.Connection) -> list[FoundRow]:
            found = connection.exec_driver_sql(
                f"SELECT {columns}, CASE WHEN due_at_ms <= {self._dialect.now_ms} THEN 1 ELSE 0 END "
                f"FROM {table_sql(connection, self._outbox)} "
                f"WHERE message_id IN ({listed(connection, message_ids)})"
            )
            return [
                FoundRow(
                    message_id=bytes(message_id),
                    state=state,
                    token=token and bytes(token),
                    is_due=bool(is_due),
                    error=error or "",
                    record=record and bytes(record),
                )
                for message_id, state, token, error, record, is_due in found
            ]

        return self._own.look(find) if message_ids else []

    def settle(
        self,
        outcome: BatchOutcome,
        *,
        token: bytes,
        keep_ms: int | None = None,
        claimed: Sequence[OutboxRow] = (),
    ) -> int:
        """Record the outcome of a batch; returns how many rows were changed.

        Sent rows are deleted, or kept for an audit with `keep_ms`; failed ones are returned with a
        later due time, others parked. `claimed` is the batch as `claim` returned it for this token.
        """
        if not (outcome.sent or outcome.failed or outcome.parked):
            return 0
        settling = self._settling

        def record(connection: sa.Connection, is_wary: bool) -> int:
            return (
                settling.remove(connection, outcome.sent, token, keep_ms, claimed, is_wary=is_wary)
                + settling.give_back(connection, outcome.failed, token)
                + settling.park(connection, outcome.parked, token)
            )

        return self._removed(record)

    def delete_sent(
        self, message_ids: Sequence[bytes], *, token: bytes, keep_ms: int | None = None
    ) -> int:
        """Delete accepted rows that `token` still owns; returns how many.

        With `keep_ms` they stay for an audit until `purge_sent` runs after that time.
        """
        if not message_ids:
            return 0

        def remove(connection: sa.Connection, is_wary: bool) -> int:
            return self._settling.remove(connection, message_ids, token, keep_ms, is_wary=is_wary)

        return self._removed(remove)

    def purge_sent(self, *, limit: int = _PURGED_ROWS_MAX) -> int:
        """Delete up to `limit` rows kept for an audit whose time is over; returns how many."""
        chosen = (
            sa.select(self._outbox.c.id)
            .where(self._outbox.c.state == SENT, self._outbox.c.due_at_ms <= self._now_ms)
            .order_by(self._outbox.c.due_at_ms)
            .limit(limit)
        )

        def purge(connection: sa.Connection, is_wary: bool) -> int:
            row_ids = connection.scalars(chosen).all()
            return self._settling.purge(connection, row_ids, is_wary=is_wary)

        return self._removed(purge)

    def waiting_before(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[bytes]]:
        """For each subject and ordering key, the ids of its unsent rows in commit order.

        See `waiting.py`.
        """
        return self._own.read(lambda connection: waiting_ids(connection, self._outbox, keys))

    def prepare_ordering(self) -> None:
        """Fill the table of locks for ordering keys, unless it is filled."""
        fill_order_locks(self._own, self._resolved.order_lock)

    def oldest_unsent_age_ms(self) -> int | None:
        """Age of the oldest live row; None if there is none.

        Exact up to a thousand live rows; beyond, the oldest among those that fall due first.
        """
        first = (
            sa.select(self._outbox.c.created_at_ms)
            .where(self._outbox.c.state == LIVE)
            .order_by(self._outbox.c.due_at_ms)
            .limit(_OLDEST_AMONG_ROWS)
            .subquery()
        )
        age = sa.select(self._now_ms - sa.func.min(first.c.created_at_ms))
        age_ms: int | None = self._own.read(lambda connection: connection.scalar(age))
        return None if age_ms is None else max(0, age_ms)

    def counts(self, *, rows_max: int | None = None) -> OutboxCounts:
        """Numbers of live, due and parked rows; with `rows_max`, each count stops there.

        Without `rows_max` it reads the index entries of all rows.
        """
        state, due_at_ms = self._outbox.c.state, self._outbox.c.due_at_ms
        kinds = (state == LIVE, (state == LIVE) & (due_at_ms <= self._now_ms), state == PARKED)
        query = sa.select(
            *(
                sa.select(sa.func.count())
                .select_from(sa.select(sa.literal(1)).where(kind).limit(rows_max).subquery())
                .scalar_subquery()
                for kind in kinds
            )
        )
        live, due, parked = self._own.read(lambda connection: connection.execute(query).one())
        return OutboxCounts(live=live, due=due, parked=parked)

    def list_rows(
        self,
        chosen: RowFilter = ALL_ROWS,
        *,
        state: int | None = None,
        is_due: bool = False,
        limit: int = 100,
    ) -> list[StoredRow]:
        """Up to `limit` rows for a listing, 1,000 at most, ordered by state, then by due time.

        All states if `state` is None; with `is_due` only rows that are due by the database's clock.
        """
        query = stored_rows(self._outbox)
        query = query.where(*self._conditions(chosen, state=state, is_due=is_due))
        query = query.limit(min(limit, _LISTED_ROWS_MAX))
        found = self._own.read(lambda connection: connection.execute(query).all())
        return [StoredRow(**row._mapping) for row in found]

    def count_rows(
        self,
        chosen: RowFilter = ALL_ROWS,
        *,
        state: int | None = None,
        is_due: bool = False,
        rows_max: int,
    ) -> int:
        """How many rows `list_rows` would find without a limit; no more than `rows_max`."""
        conditions = self._conditions(chosen, state=state, is_due=is_due)
        rows = sa.select(sa.literal(1)).select_from(self._outbox).where(*conditions)
        count = sa.select(sa.func.count()).select_from(rows.limit(rows_max).subquery())
        return self._own.read(lambda connection: connection.scalar(count)) or 0

    def read_record(self, message_id: bytes) -> bytes | None:
        """The record of one row as it is stored, perhaps damaged; None if the row is gone."""
        columns = self._outbox.c
        record = sa.cast(columns.record, sa.LargeBinary())
        query = sa.select(record).where(columns.message_id == message_id)
        found: bytes | None = self._own.read(lambda connection: connection.scalar(query))
        return found

    def retry(self, chosen: RowFilter = ALL_ROWS, *, rows_max: int = CHANGED_ROWS_MAX) -> int:
        """Make parked rows live and due again, with 0 attempts; returns how many.

        Takes rows that were parked when it began, in transactions of up to `rows_max` each.
        """
        again = (
            sa.update(self._outbox)
            .where(self._outbox.c.state == PARKED)
            .values(state=LIVE, due_at_ms=self._now_ms, attempts=0, token=None)
        )
        return self._change(again, chosen, state=PARKED, rows_max=rows_max)

    def purge(
        self,
        chosen: RowFilter = ALL_ROWS,
        *,
        state: int = PARKED,
        rows_max: int = CHANGED_ROWS_MAX,
    ) -> int:
        """Delete rows of `state` without sending them; returns how many.

        Takes rows that existed when it began, in transactions like those of `retry`. Requires: a person requested it.
        """
        delete = sa.delete(self._outbox).where(self._outbox.c.state == state)
        return self._change(delete, chosen, state=state, rows_max=rows_max)

    def _change(
        self, change: sa.Update | sa.Delete, chosen: RowFilter, *, state: int, rows_max: int
    ) -> int:
        fitting = list(self._conditions(chosen, state=state))
        return change_by_hand(self._own, change, fitting, state=state, rows_max=rows_max)

    def _conditions(
        self, chosen: RowFilter, *, state: int | None, is_due: bool = False
    ) -> Iterator[sa.ColumnElement[bool]]:
        return conditions(self._outbox, self._now_ms, chosen, state=state, is_due=is_due)

    def check_schema(
        self,
        needed: Sequence[sa.Table] | None = None,
        *,
        role: Role = PRODUCER,
        asks_rights: bool = False,
    ) -> None:
        """Raise `OutboxMissingError` if the tables or the server are unfit; it names each fault.

        Checks all tables, or only those `needed`, because a user may have no right to see others.
        With `asks_rights`, or if a table is hidden, also raises if this user lacks a right that
        its role needs.
        """
        looked_at = self._tables.all if needed is None else needed

        def look(connection: sa.Connection) -> Faults | None:
            return faults_of(connection, self._dialect, self._tables, looked_at, role, asks_rights)

        if faults := self._own.write(look):
            raise missing_error(self._application, faults)

    @property
    def now_ms(self) -> sa.ColumnElement[int]:
        """The time by the database's clock, as an SQL expression in milliseconds."""
        return self._now_ms

    def write(self, work: Callable[[sa.Connection], _Result]) -> _Result:
        """Run `work` in a short transaction on this store's own pool; for QMQ's other tables."""
        return self._own.write(work)

    def quiet_moment(self) -> AbstractContextManager[bool]:
        """Yields whether a write inside the block disturbs no open transaction of the application.

        On SQLite a transaction that has read fails at its first write if another connection wrote
        in between.
        """
        return self._dialect.quiet_moment()

    def after_fork(self) -> None:
        """In a forked child: never use or close a connection of the parent."""
        self._dialect.after_fork()
        self._own.after_fork()

    def rest(self) -> None:
        """Close this store's idle connections except one."""
        self._own.rest()

    def close(self) -> None:
        """Close this store's connections; it may be used again."""
        self._own.close()

    def _written(self, work: Callable[[sa.Connection], _Result]) -> _Result:
        """One short transaction, repeated if it was undone to break a deadlock."""
        return repeat_when_undone(lambda: self._own.write(work))

    def _reclaim(
        self, connection: sa.Connection, ids: Sequence[bytes], token: bytes, lease_ms: int
    ) -> set[bytes]:
        table, some = table_sql(connection, self._outbox), listed(connection, ids)
        is_owned = (
            f"message_id IN ({some}) AND token = {self._dialect.binary(token)}"  # and so is live
        )
        connection.exec_driver_sql(
            f"UPDATE {table} SET due_at_ms = {self._dialect.now_ms} + {lease_ms:d} WHERE {is_owned}"
        )
        found = connection.exec_driver_sql(f"SELECT message_id FROM {table} WHERE {is_owned}")
        return set(map(bytes, found.scalars()))

    def _removed(self, remove: Callable[[sa.Connection, bool], int]) -> int:
        """`_written` for deletions; repeated with `is_wary` if the database refused a row."""
        try:
            return self._written(lambda connection: remove(connection, False))
        except sa.exc.DBAPIError as error:
            if not self._dialect.is_refused(error):
                raise
        return self._written(lambda connection: remove(connection, True))
