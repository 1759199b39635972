"""The outbox for those that own its rows: claim them, settle them, look after them.

The publisher uses it for rows of its own process, the watchdog for rows left behind. Any number of
both may work at once, because every change names the row *and* its token, so a late owner changes
none. Rows are found by state and due time only. Each method is one short transaction on the store's
own pool, never on the application's, and uses only the database's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Final, TypeVar

import sqlalchemy as sa

from qmq_client.errors import OutboxMissingError
from qmq_client.outbox.checking.rights import PRODUCER, Rights, Role, lacking_texts
from qmq_client.outbox.checking.schema import look_at_schema
from qmq_client.outbox.committed.by_hand import CHANGED_ROWS_MAX, change_by_hand
from qmq_client.outbox.committed.choice import conditions, stored_rows
from qmq_client.outbox.committed.deletes import chunks
from qmq_client.outbox.committed.settling import Settling
from qmq_client.outbox.committed.waiting import fill_order_locks, waiting_ids
from qmq_client.outbox.database.claiming import CLAIM_BYTES_MAX, ClaimTerms
from qmq_client.outbox.database.deadlock import repeat_when_undone
from qmq_client.outbox.database.dialect import dialect_of
from qmq_client.outbox.database.driver import keep_one_connection
from qmq_client.outbox.row import (
    ALL_ROWS,
    BatchOutcome,
    OutboxCounts,
    OutboxRow,
    RowFilter,
    StoredRow,
)
from qmq_client.outbox.table import DEFAULT_TABLES, LIVE, PARKED, SENT, Tables

_Result = TypeVar("_Result")

#: Rows looked at to find the oldest: constant work however many wait.
_OLDEST_AMONG_ROWS: Final = 1_000
_LISTED_ROWS_MAX: Final = 1_000
_PURGED_ROWS_MAX: Final = 10_000
_MAKE_TABLES: Final = (
    " Run `qmq db migrate`, or your own migrations if they have it; for a first try "
    "`qmq_client.create_tables(engine)`."
)


class OutboxStore:
    """The outbox of one database. Safe for any number of threads.

    Raises errors of the database as SQLAlchemy's own (`sqlalchemy.exc.SQLAlchemyError`).
    """

    def __init__(self, engine: sa.Engine, tables: Tables = DEFAULT_TABLES) -> None:
        self._dialect = dialect_of(engine)
        self._tables = tables
        self._outbox = tables.outbox
        self._application = engine
        self._sibling = self._dialect.open_sibling(engine)
        #: The longest record that one statement can carry; None if the server sets no limit.
        self.record_bytes_max: int | None = None
        self._now_ms: sa.ColumnElement[int] = sa.literal_column(
            self._dialect.now_ms, sa.BigInteger()
        )
        self._settling = Settling(self._outbox, self._now_ms, self._dialect.is_refused)

    @property
    def undeleted(self) -> int:
        """Number of rows that the database did not delete when this store first tried.

        Their messages are accepted; see `undeleted.py`.
        """
        return self._settling.undeleted.count

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

        Takes due rows or, with `keys`, rows of these ordering keys that belong to nobody. Ends with
        the row at which their records reach `bytes_max`.
        """

        terms = ClaimTerms(
            token=token, limit=limit, lease_ms=lease_ms, keys=keys, bytes_max=bytes_max
        )

        def claim(connection: sa.Connection) -> list[OutboxRow]:
            return self._dialect.claim(connection, self._outbox, terms)

        return self._written(claim)

    def reclaim(self, message_ids: Sequence[bytes], *, token: bytes, lease_ms: int) -> set[bytes]:
        """Those committed rows among these that `token` still owns; extends their leases.

        Also tells which rows of a commit with unknown outcome exist.
        """

        def reclaim(connection: sa.Connection) -> set[bytes]:
            owned: set[bytes] = set()
            for ids in chunks(message_ids):
                owned |= self._dialect.reclaim(
                    connection, self._outbox, ids, token=token, lease_ms=lease_ms
                )
            return owned

        return self._written(reclaim)

    def settle(
        self,
        outcome: BatchOutcome,
        *,
        token: bytes,
        keep_ms: int | None = None,
        claimed: Sequence[OutboxRow] = (),
    ) -> int:
        """Record what became of a batch; returns how many rows were changed.

        Sent rows are deleted, or kept for an audit with `keep_ms`; failed ones are given back with
        a later due time, others parked. `claimed`: the batch as one claim with this token returned
        it.
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
        """Delete up to `limit` rows that were kept for an audit and whose time is over."""
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
        with self._dialect.read(self._sibling) as connection:
            return waiting_ids(connection, self._outbox, keys)

    def prepare_ordering(self) -> None:
        """Fill the table of locks for ordering keys, if that was not done before."""
        fill_order_locks(self._dialect, self._sibling, self._tables.order_lock)

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
        with self._dialect.read(self._sibling) as connection:
            age_ms: int | None = connection.scalar(
                sa.select(self._now_ms - sa.func.min(first.c.created_at_ms))
            )
        return None if age_ms is None else max(0, age_ms)

    def counts(self, *, rows_max: int | None = None) -> OutboxCounts:
        """Number of rows; with `rows_max`, counting stops there.

        Without a bound it reads the index of all rows, however many there are.
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
        with self._dialect.read(self._sibling) as connection:
            live, due, parked = connection.execute(query).one()
        return OutboxCounts(live=live, due=due, parked=parked)

    def list_rows(
        self,
        chosen: RowFilter = ALL_ROWS,
        *,
        state: int | None = None,
        is_due: bool = False,
        limit: int = 100,
    ) -> list[StoredRow]:
        """Rows for people to look at, those due first at the top; all states if `state` is None.

        With `is_due` only rows that are due by the database's clock.
        """
        query = stored_rows(self._outbox)
        query = query.where(*self._conditions(chosen, state=state, is_due=is_due))
        with self._dialect.read(self._sibling) as connection:
            found = connection.execute(query.limit(min(limit, _LISTED_ROWS_MAX))).all()
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
        with self._dialect.read(self._sibling) as connection:
            return connection.scalar(count) or 0

    def read_record(self, message_id: bytes) -> bytes | None:
        """The record of one row as it is stored, perhaps damaged; None if the row is gone."""
        columns = self._outbox.c
        record = sa.cast(columns.record, sa.LargeBinary())
        with self._dialect.read(self._sibling) as connection:
            found: bytes | None = connection.scalar(
                sa.select(record).where(columns.message_id == message_id)
            )
        return found

    def retry(self, chosen: RowFilter = ALL_ROWS, *, rows_max: int = CHANGED_ROWS_MAX) -> int:
        """Make parked rows live and due again, with no attempts counted; returns how many.

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
        """Delete rows of `state` for good, unsent; returns how many.

        Takes rows that were there when it began, in transactions like those of `retry`. Requires: a
        person asked for it.
        """
        delete = sa.delete(self._outbox).where(self._outbox.c.state == state)
        return self._change(delete, chosen, state=state, rows_max=rows_max)

    def _change(
        self, change: sa.Update | sa.Delete, chosen: RowFilter, *, state: int, rows_max: int
    ) -> int:
        fitting = list(self._conditions(chosen, state=state))
        return change_by_hand(
            self._dialect, self._sibling, change, fitting, state=state, rows_max=rows_max
        )

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
        """Raise `OutboxMissingError`, which names each fault of the tables and of the server.

        Checks all tables, or those `needed`: a user of the database may have no right to see
        others. With `asks_rights`, or if a table is hidden, also raises if this user lacks a right
        that its role needs. Afterwards `record_bytes_max` is the limit of this server.
        """
        looked_at = self._tables.all if needed is None else needed
        with self._dialect.write(self._sibling) as connection:
            look = look_at_schema(connection, self._tables, looked_at)
            remedy = _MAKE_TABLES if look.faults else ""  # of what a server lacks it says more
            faults = look.faults or self._dialect.faults(connection, looked_at)
            if not faults and (asks_rights or look.hidden):
                lacks = Rights(connection).lacking(role, self._tables)
                faults = lacking_texts(connection, role, lacks)
            self.record_bytes_max = self._dialect.record_bytes_max(connection)
        if faults:
            database = self._application.url.render_as_string(hide_password=True)
            raise OutboxMissingError(f"{'; '.join(faults)} in {database}.{remedy}")

    @property
    def now_ms(self) -> sa.ColumnElement[int]:
        """The clock of this database, as an expression."""
        return self._now_ms

    def write(self) -> AbstractContextManager[sa.Connection]:
        """A short transaction on this store's own pool, for the care of our other tables."""
        return self._dialect.write(self._sibling)

    def after_fork(self) -> None:
        """In a forked child: never use or close a connection of the parent."""
        self._dialect.after_fork(self._sibling)

    def rest(self) -> None:
        """Close this store's connections except one."""
        keep_one_connection(self._sibling.pool)

    def close(self) -> None:
        """Close this store's connections; it may be used again."""
        self._dialect.close_sibling(self._sibling)

    def _written(self, work: Callable[[sa.Connection], _Result]) -> _Result:
        """One short transaction, repeated if it was undone to break a deadlock."""

        def transaction() -> _Result:
            with self._dialect.write(self._sibling) as connection:
                return work(connection)

        return repeat_when_undone(transaction)

    def _removed(self, remove: Callable[[sa.Connection, bool], int]) -> int:
        """The same for deletions; once more, warily, if the database refused one of the rows."""
        try:
            return self._written(lambda connection: remove(connection, False))
        except sa.exc.DBAPIError as error:
            if not self._dialect.is_refused(error):
                raise
        return self._written(lambda connection: remove(connection, True))
