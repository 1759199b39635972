"""What the pages of the pipeline say is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.cli import pipeline
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.options import LOG_OPTIONS, Place
from qmq_pipeline.places.outbox_options import OUTBOX_OPTIONS
from qmq_pipeline.tables.schemas import MESSAGES, SCHEDULED, TABLES
from qmq_pipeline.tables.table import Table
from tests.pipeline.bronze import write_bronze
from tests.pipeline.world import START_MS, DataDirectory, OutboxDatabase, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, SOURCES_PAGE, TABLES_PAGE = (
    (_DOCS / name).read_text(encoding="utf-8")
    for name in ("pipeline.md", "pipeline-sources.md", "pipeline-tables.md")
)


def listed_columns(table: Table) -> list[tuple[str, ...]]:
    """What the section of a table lists, with the columns that it has from another one."""
    section = TABLES_PAGE.split(heading(table) + "\n")[1].split("\n#")[0]
    key = ", ".join(f"`{name}`" for name in table.key)
    assert f"Key: {key}. Version {table.version}." in section
    above = listed_columns(MESSAGES) if "The columns of `messages`, and:" in section else []
    return above + re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", section, re.MULTILINE)


def heading(table: Table) -> str:
    return f"### {table.layer} `{table.name}`"


def test_every_column_of_the_tables_is_on_the_page_with_its_meaning() -> None:
    for table in TABLES.values():
        told = [(one.name, one.kind, one.meaning) for one in table.columns]
        assert listed_columns(table) == told, table.name
    assert SCHEDULED.columns[: len(MESSAGES.columns)] == MESSAGES.columns


def test_the_list_of_tables_leads_to_each_of_them() -> None:
    listed = TABLES_PAGE.split("| Layer |")[1].split("\n\n")[0]
    led = re.findall(r"\[`(\w+)`\]\(#(\w+)-(\w+)\)", listed)
    assert sorted(led) == sorted((one.name, one.layer, one.name) for one in TABLES.values())


def test_every_option_and_command_is_on_the_page() -> None:
    table = SOURCES_PAGE.split("| Option of `qmq` | |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(LOG_OPTIONS)
    for option in OUTBOX_OPTIONS:
        assert f"`{option}`" in SOURCES_PAGE
    for command in pipeline.commands:
        assert f"`qmq pipeline {command}`" in PAGE


def test_every_option_of_a_command_on_the_pages_is_one() -> None:
    # A long command goes on in the next line.
    lines = (PAGE + SOURCES_PAGE + TABLES_PAGE).replace("\\\n", "")
    for line in re.findall(r"^qmq pipeline (\w+) +(.*)$", lines, re.MULTILINE):
        known = {name for one in pipeline.commands[line[0]].params for name in one.opts}
        assert set(re.findall(r"--[a-z-]+", line[1])) <= known, line


def test_the_lines_of_python_on_the_pages_run(
    spark: SparkSession, database: OutboxDatabase, tmp_path: Path
) -> None:
    directory = DataDirectory(tmp_path / "broker")
    *every, missing = messages(MessageIds(1), 31, subjects=("a", "b"))
    directory.append(every)
    directory.close()
    database.insert([*every, missing], created_at_ms=START_MS)
    config = PipelineConfig(tables=str(tmp_path / "tables"), place=Place(path=str(directory.path)))
    write_bronze(config)
    lifecycle(spark, config)
    names: dict[str, Any] = {
        "directory": str(directory.path),
        "database": database.section.url,
        "lake": str(tmp_path / "lake"),
        "tables": config.tables,
    }
    for page in (PAGE, SOURCES_PAGE, TABLES_PAGE):
        (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        exec(block, names)
    assert [row["message_id"] for row in names["missing"].collect()] == [missing.message_id.hex()]
    minutes = [(row["subject"], row["count"]) for row in names["minutes"].collect()]
    assert sorted(minutes) == [("a", 15), ("b", 15)]
    rows = names["by_subject"].collect()
    assert {(row["subject"], row["count"]) for row in rows} == {("a", 15), ("b", 15)}
    assert names["late"].count() == 0
    assert names["lived"].count() == 30
