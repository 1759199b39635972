"""What docs/pipeline.md says is what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.cli import pipeline
from qmq_pipeline.places.options import LOG_OPTIONS
from qmq_pipeline.places.outbox_options import OUTBOX_OPTIONS
from qmq_pipeline.tables.schemas import TABLES
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")


def test_every_column_of_the_tables_is_on_the_page_with_its_meaning() -> None:
    for table in TABLES.values():
        head = f"### {table.layer} `{table.name}`"
        section = PAGE.split(head + "\n")[1].split("\n#")[0]
        listed = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", section, re.MULTILINE)
        assert listed == [(one.name, one.kind, one.meaning) for one in table.columns], head
        assert (
            f"Key: {', '.join(f'`{name}`' for name in table.key)}. Version {table.version}."
            in section
        )


def test_every_option_and_command_is_on_the_page() -> None:
    table = PAGE.split("| Option of `qmq` | |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(LOG_OPTIONS)
    for option in OUTBOX_OPTIONS:
        assert f"`{option}`" in PAGE
    for command in pipeline.commands:
        assert f"`qmq pipeline {command}`" in PAGE


def test_every_option_of_a_command_on_the_page_is_one() -> None:
    lines = PAGE.replace("\\\n", "")  # a long command goes on in the next line
    for line in re.findall(r"^qmq pipeline (\w+) +(.*)$", lines, re.MULTILINE):
        known = {name for one in pipeline.commands[line[0]].params for name in one.opts}
        assert set(re.findall(r"--[a-z-]+", line[1])) <= known, line


def test_the_lines_of_python_on_the_page_run(spark: SparkSession, tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 30, subjects=("a", "b")))
    directory.close()
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"directory": str(directory.path)}
    exec(block, names)
    rows = names["by_subject"].collect()
    assert {(row["subject"], row["count"]) for row in rows} == {("a", 15), ("b", 15)}
    assert names["late"].count() == 0
