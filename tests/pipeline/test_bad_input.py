"""What cannot be done is told in one line, by what it is; nothing is said of Spark where Spark had no part in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_client.wire.message_id import MessageIds
from qmq_pipeline.errors import carried
from qmq_pipeline.spark.explain import explain
from tests.pipeline.world import DataDirectory, messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def qmq(*arguments: str | Path) -> Result:
    line = ["pipeline", *map(str, arguments)]
    return CliRunner().invoke(root, line, catch_exceptions=False)


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    directory = DataDirectory(tmp_path / "broker")
    directory.append(messages(MessageIds(1), 5))
    directory.close()
    return directory.path


def test_a_folder_that_is_a_file_is_named_with_what_to_look_at(
    spark: SparkSession, tmp_path: Path, broker: Path
) -> None:
    (tmp_path / "tables").write_text("a file")
    for job in (("ingest", "--path", broker), ("ingest", "--path", broker, "--follow")):
        result = qmq(*job, "--tables", tmp_path / "tables", "--quiet")
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith(f"Error: {tmp_path}/tables: this is not a folder")
        assert line.endswith("Give --tables a folder")
    assert (tmp_path / "tables").read_text() == "a file"


def test_an_empty_name_of_a_folder_is_not_this_folder(
    tmp_path: Path, broker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    result = qmq("ingest", "--tables", "", "--path", broker)
    assert result.exit_code == 2
    assert "Name the folder for the tables" in result.stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("option", ["--grace", "--late"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon"])
def test_a_span_of_time_that_is_none_is_a_wrong_call(
    tmp_path: Path, option: str, value: str
) -> None:
    result = qmq("audit", "--tables", tmp_path, option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr


@pytest.mark.parametrize("until", ["2026-01-31", "2026-01-30", "0"])
def test_a_window_without_any_time_is_a_wrong_call_and_not_clean(
    tmp_path: Path, until: str
) -> None:
    result = qmq("audit", "--tables", tmp_path, "--since", "2026-01-31", "--until", until)
    assert result.exit_code == 2
    assert "allowed: a time after --since" in result.stderr


def test_a_look_needs_a_time_to_wait(tmp_path: Path, broker: Path) -> None:
    result = qmq(
        "ingest", "--tables", tmp_path / "t", "--path", broker, "--follow", "--every", "nan"
    )
    assert result.exit_code == 2
    assert (
        "Invalid value for '--every': nan is not a number of seconds; write one like"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ingest --path {} --every 10", "--every needs --follow"),
        ("ingest --database orders --follow", "--follow needs --path or --broker"),
        ("ingest --database orders --skip-expired", "--skip-expired needs --path or --broker"),
        ("run --database orders --skip-expired", "--skip-expired needs --path or --broker"),
        ("ingest --path {} --token-file token", "--token-file needs --broker"),
        ("audit --path {} --wait 5", "--wait needs --broker"),
        ("archive --path {} --keeper a", "--keeper needs --broker"),
        ("replay --where TRUE --to group:a --same-ids", "need --to subject:NAME"),
        ("replay --where TRUE --to group:a --name b", "need --to subject:NAME"),
    ],
)
def test_an_option_that_would_have_no_effect_is_a_wrong_call(
    tmp_path: Path, broker: Path, line: str, told: str
) -> None:
    job, *options = line.format(broker).split()
    result = qmq(job, "--tables", tmp_path / "tables", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert not (tmp_path / "tables").exists()


def test_what_nobody_expected_is_reported_with_its_kind_and_where_it_was() -> None:
    told = str(explain(KeyError("side"), "some.log"))
    assert told == "unexpected KeyError: 'side'. The traceback is in some.log."
    full = str(carried("OSError", "[Errno 28] No space left on device"))
    assert full.endswith(
        "No space left on device. Check that it is there, may be written, and has room."
    )
    assert str(carried("KeyError", "'a'")) == "a worker failed: KeyError: 'a'"
    assert "Spark" not in str(explain(PermissionError(13, "Permission denied", "/a"), "some.log"))
