"""A table's files as an Iceberg table, in a catalog that is configured for pyiceberg.

Each change is one snapshot. Iceberg names files by full URLs, so a folder of tables that was moved
counts as another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from sqlalchemy.exc import SQLAlchemyError

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.errors import LakeError, OptionError, UnreachableError
from qmq_pipeline.tables.damage import told_by_name
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.listing import Change
from qmq_pipeline.tables.table import Table

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.table import Transaction

#: Property that names the folder whose files a table lists.
_FOLDER: Final = "qmq.folder"
_PROPERTIES: Final = {
    # Clean-ups by other programs leave our files alone.
    "gc.enabled": "false",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "10",
}
#: Older snapshots name files that are gone. Some are kept for queries that are still reading one.
_SNAPSHOT_AGE_MS: Final = 24 * 3_600_000
#: Expiring them is a commit of its own, so some dozens go at once.
_OLD_SNAPSHOTS_MAX: Final = 50


def open_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """The catalog of this name (the default one for ""), by pyiceberg's configuration and these properties.

    Raises `OptionError` if these do not say which catalog it is, and `UnreachableError` if it does
    not answer.
    """
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NotInstalledError

    try:
        return load_catalog(name or None, **properties)
    except (ValueError, NotInstalledError) as error:
        raise OptionError(
            option="--catalog",
            value=f"{name or 'the default one'}: {' '.join(str(error).split())}",
            allowed="a catalog of pyiceberg",
            remedy="Configure it in ~/.pyiceberg.yaml or by PYICEBERG_CATALOG__<NAME>__TYPE, …__URI "
            "and …__WAREHOUSE.",
        ) from error
    except (OSError, SQLAlchemyError) as error:
        raise UnreachableError(
            source=f"catalog {name or 'default'}",
            reason=f"it cannot be opened: {' '.join(str(error).split())}",
            remedy="Look at its URI in ~/.pyiceberg.yaml or PYICEBERG_CATALOG__<NAME>__URI, and whether it is up",
        ) from error


class IcebergListing:
    """See `listing.py`."""

    def __init__(self, lake: Lake, table: Table, catalog: Catalog, namespace: str) -> None:
        self._lake = lake
        self._table = table
        self._catalog = catalog
        self._namespace = namespace
        self.name = f"{namespace}.{table.name}"
        #: Several catalogs may have the table, and one catalog in several namespaces.
        self.kept_as = ".".join(("iceberg", *map(_word, (catalog.name, namespace))))
        url = lake.url(lake.folder(table))
        self._folder = url if "://" in url else f"file://{url}"

    def files(self) -> dict[str, int] | None:
        """See `Listing`."""
        with self._told():
            found = self._open()
            if found is None:
                return None
            return {path: one.file_size_in_bytes for path, one in self._listed(found).items()}

    def apply(self, change: Change) -> None:
        """See `Listing`."""
        with self._told():
            found = self._open() or self._create()
            with found.transaction() as transaction:
                known = {field.name for field in found.schema().fields}
                if set(self._table.names) - known:
                    with transaction.update_schema() as columns:
                        columns.union_by_name(self._table.arrow())
                if transaction.table_metadata.name_mapping() is None:
                    # Our files have no column numbers, so readers map columns by name.
                    mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
                    transaction.set_properties({"schema.name-mapping.default": mapping})
                self._snapshot(found, transaction, change)
            before_ms = SYSTEM_CLOCK.now_ms() - _SNAPSHOT_AGE_MS
            old = [one.snapshot_id for one in found.snapshots() if one.timestamp_ms < before_ms]
            if len(old) > _OLD_SNAPSHOTS_MAX:
                found.maintenance.expire_snapshots().by_ids(old).commit()

    def _snapshot(self, found: IcebergTable, transaction: Transaction, change: Change) -> None:
        from pyiceberg.io.pyarrow import parquet_file_to_data_file

        update = transaction.update_snapshot(snapshot_properties={"qmq.commit": change.commit})
        listed = self._listed(found) if change.removed else {}
        with update.overwrite() if change.removed else update.merge_append() as snapshot:
            for path in change.removed:
                snapshot.delete_data_file(listed[path])
            for file in change.added:
                url = f"{self._folder}/{file.path}"
                metadata = transaction.table_metadata
                with told_by_name(self._lake.root, f"{self._lake.folder(self._table)}/{file.path}"):
                    data_file = parquet_file_to_data_file(found.io, metadata, url)
                snapshot.append_data_file(data_file)

    def _open(self) -> IcebergTable | None:
        """The table; refuses one of that name that lists something else."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            found = self._catalog.load_table(self.name)
        except NoSuchTableError:
            return None
        folder = found.properties.get(_FOLDER)
        if folder != self._folder:
            raise LakeError(
                path=self.name,
                reason=f"the catalog's table of that name is of {folder or 'somebody else'}, not of {self._folder}",
                remedy="Give another --namespace, or drop that table from the catalog",
            )
        return found

    def _create(self) -> IcebergTable:
        self._catalog.create_namespace_if_not_exists(self._namespace)
        unmeasured = {
            f"write.metadata.metrics.column.{column.name}": "none"
            for column in self._table.columns
            if column.kind == "bytes"  # of which our files tell no least and no greatest value
        }
        properties = {**_PROPERTIES, **unmeasured, _FOLDER: self._folder}
        return self._catalog.create_table(
            self.name, schema=self._table.arrow(), properties=properties
        )

    def _listed(self, found: IcebergTable) -> dict[str, IcebergFile]:
        return {
            task.file.file_path.removeprefix(f"{self._folder}/"): task.file
            for task in found.scan().plan_files()
        }

    @contextmanager
    def _told(self) -> Iterator[None]:
        """The library's error as one of ours."""
        from pyiceberg.exceptions import CommitFailedException, RESTError
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

        try:
            yield
        except UnsupportedPyArrowTypeException as error:
            raise LakeError(
                path=self.name,
                reason="its files were written by an older version, with times that Iceberg does not take",
                remedy="Rebuild the tables with `qmq pipeline run --full`",
            ) from error
        except (CommitFailedException, RESTError, SQLAlchemyError, OSError, ValueError) as error:
            raise LakeError(
                path=self.name,
                reason=f"Iceberg says: {' '.join(str(error).split())}",
                remedy="If another run has changed it, run again; see that the catalog answers and its warehouse can be written",
            ) from error


def _word(name: str) -> str:
    """As part of a file's name between dots."""
    return quote(name, safe="").replace(".", "%2E")
