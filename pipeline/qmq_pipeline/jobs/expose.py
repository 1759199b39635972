"""`qmq pipeline expose`: lets programs that read Delta or Iceberg find the tables, without copying rows.

Each table's listing is updated to name the files of the table's current commits; see
`tables/listing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qmq_pipeline.errors import OptionError
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import ExposeOptions, PipelineConfig
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.listing import Listing, Updated, update
from qmq_pipeline.tables.schemas import TABLES
from qmq_pipeline.tables.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """The result of one run."""

    #: Listings by table name.
    tables: dict[str, Updated]


def expose(
    config: PipelineConfig, options: ExposeOptions, *, on_progress: OnProgress = nobody
) -> Exposed:
    """Bring the listings up to date with the tables. Needs no Spark.

    Raises `OptionError` for an unknown table or catalog, and `LakeError`; tables exposed before it
    stay exposed.
    """
    lake = Lake(config.tables)
    lake.require()
    chosen = _chosen(lake, options.tables)
    listing_of = _listings(lake, options)
    done: dict[str, Updated] = {}
    with lake.writing():
        for number, table in enumerate(chosen, start=1):
            done[table.name] = update(lake, table, listing_of(table))
            rows = sum(one.rows for one in done.values())
            stage = f"expose {options.format}"
            on_progress(Progress(stage=stage, done=number, total=len(chosen), rows=rows))
    return Exposed(tables=done)


def _chosen(lake: Lake, names: Sequence[str]) -> list[Table]:
    for name in names:
        if name not in TABLES:
            raise OptionError(
                option="--table",
                value=name,
                allowed=", ".join(TABLES),
                remedy="Name one of these tables.",
            )
    every = [TABLES[name] for name in dict.fromkeys(names)] or list(TABLES.values())
    return [table for table in every if lake.newest(table) is not None]


def _listings(lake: Lake, options: ExposeOptions) -> Callable[[Table], Listing]:
    if options.format == "delta":
        from qmq_pipeline.tables.delta import DeltaListing

        return lambda table: DeltaListing(lake, table)
    from qmq_pipeline.tables.iceberg import IcebergListing, open_catalog

    if not all(word.strip() for word in options.namespace.split(".")):
        raise OptionError(
            option="--namespace",
            value=f'"{options.namespace}"',
            allowed="a name, or several joined by dots",
            remedy="Give the namespace in which the catalog is to have the tables.",
        )
    catalog = open_catalog(options.catalog, options.catalog_properties)
    return lambda table: IcebergListing(lake, table, catalog, options.namespace)
