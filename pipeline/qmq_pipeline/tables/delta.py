"""A table's files as a Delta table, in the table's own folder; its log is the folder `_delta_log`.

Each change is one version of that log. The library `deltalake` writes it, checkpoints it, and
removes old versions. Its paths are relative, so a folder of tables may be moved or copied as a
whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import pyarrow as pa

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeError
from qmq_pipeline.tables.commits import DataFile
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.listing import Change
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import AddAction

#: For both: VACUUM spares younger files of the folder, which include our newest ones, and the log
#: forgets removed files and its own versions when they are older.
_RETENTION: Final = "interval 30 days"
_CONFIGURATION: Final = {
    "delta.deletedFileRetentionDuration": _RETENTION,
    "delta.logRetentionDuration": _RETENTION,
    "delta.enableExpiredLogCleanup": "true",
}
#: The library unescapes even the names of folders (1.6.6).
_ESCAPED: Final = re.compile("%[0-9A-Fa-f]{2}")
#: Kinds of columns with least and greatest values in the log, by which readers skip files.
_COMPARED: Final = ("text", "long", "int", "time")
#: Longer texts would take too much space in the log.
_TEXT_MAX: Final = 64


class DeltaListing:
    """See `listing.py`."""

    #: A folder has one such log.
    kept_as = "delta"

    def __init__(self, lake: Lake, table: Table) -> None:
        """Raises `LakeError` for a folder whose name the library misreads."""
        self._lake = lake
        self._table = table
        self.name = lake.url(lake.folder(table))
        if _ESCAPED.search(self.name):
            raise LakeError(
                path=self.name,
                reason="deltalake takes the % in its name for an escaped letter, and would look elsewhere",
                remedy="Move the tables to a folder without a %",
            )

    def files(self) -> dict[str, int] | None:
        """See `Listing`."""
        with self._told():
            found = self._open()
            if found is None:
                return None
            actions = pa.table(found.get_add_actions(flatten=True))
            paths, lengths = (actions[name].to_pylist() for name in ("path", "size_bytes"))
            return {unquote(path): size for path, size in zip(paths, lengths, strict=True)}

    def apply(self, change: Change) -> None:
        """See `Listing`."""
        from deltalake import CommitProperties, Schema
        from deltalake.transaction import RemoveAction, create_table_with_add_actions

        added = [self._add_action(file) for file in change.added]
        said = CommitProperties(custom_metadata={"qmq.commit": change.commit})
        schema = Schema.from_arrow(self._table.arrow())
        with self._told():
            found = self._open()
            if found is None:
                create_table_with_add_actions(
                    self.name,
                    schema,
                    added,
                    name=self._table.name,
                    configuration=_CONFIGURATION,
                    commit_properties=said,
                )
                return
            known = {field.name for field in found.schema().fields}
            if new := [field for field in schema.fields if field.name not in known]:
                found.alter.add_columns(new)
            now_ms = SYSTEM_CLOCK.now_ms()
            removed = {path: RemoveAction(path, True, now_ms) for path in change.removed}
            # A version may not name a path twice; what the log says of such a file is wrong already.
            again = [removed.pop(file.path) for file in change.added if file.path in removed]
            steps: list[list[AddAction | RemoveAction]] = [[*again], [*removed.values(), *added]]
            for actions in steps:
                if actions:
                    found.create_write_transaction(
                        actions, "append", schema, commit_properties=said
                    )
                    found.update_incremental()

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        return DeltaTable(self.name) if DeltaTable.is_deltatable(self.name) else None

    def _add_action(self, file: DataFile) -> AddAction:
        from deltalake.transaction import AddAction

        statistics = json.dumps(self._statistics(file))
        return AddAction(file.path, file.bytes, {}, SYSTEM_CLOCK.now_ms(), True, statistics)

    def _statistics(self, file: DataFile) -> dict[str, Any]:
        told = self._lake.file_statistics(self._table, file)
        ends = {
            column.name: (_value(told[column.name].least), _value(told[column.name].greatest))
            for column in self._table.columns
            if column.kind in _COMPARED and column.name in told
        }
        short = {
            name: pair
            for name, pair in ends.items()
            if all(not isinstance(one, str) or len(one) <= _TEXT_MAX for one in pair)
        }
        return {
            "numRecords": file.rows,
            "minValues": {name: least for name, (least, _) in short.items()},
            "maxValues": {name: greatest for name, (_, greatest) in short.items()},
            "nullCount": {name: told[name].nulls for name in short},
        }

    @contextmanager
    def _told(self) -> Iterator[None]:
        """The library's error as one of ours."""
        from deltalake.exceptions import DeltaError

        try:
            yield
        except (DeltaError, OSError) as error:
            raise LakeError(
                path=self.name,
                reason=f"Delta says: {' '.join(str(error).split())}",
                remedy="If another run has changed it, run again; if its `_delta_log` is damaged, delete that folder",
            ) from error


def _value(found: object) -> object:
    if isinstance(found, datetime):
        return found.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return found
