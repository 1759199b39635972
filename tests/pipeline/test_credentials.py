"""What a broker asks of its callers comes from where all commands have it: the command line, the environment, `qmq.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from qmq_client.commands.root import root
from qmq_pipeline.command import broker_of
from tests.kit.broker_process import BrokerProcess
from tests.pipeline.world import DataDirectory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def qmq(*arguments: str | Path) -> Result:
    return CliRunner().invoke(root, [str(one) for one in arguments], catch_exceptions=False)


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """A `qmq.toml` with a token file, which holds the token of a consumer of everything."""
    tokens = ("--tokens", tmp_path / "tokens.json")
    out = ("--out", tmp_path / "token")
    added = qmq("broker", "token", "add", "reader", "--role", "consumer", *tokens, *out)
    assert added.exit_code == 0
    file = tmp_path / "qmq.toml"
    file.write_text(f'[broker]\ntoken_file = "{tmp_path}/token"\nca_file = "/ca.pem"\n')
    return file


@pytest.mark.parametrize("job", ["ingest", "archive"])
def test_a_token_file_that_is_configured_is_shown_to_the_broker(
    spark: SparkSession, configured: Path, tmp_path: Path, job: str
) -> None:
    DataDirectory(tmp_path / "broker").close()
    with BrokerProcess(
        tmp_path / "broker", "--reserve-bytes", "0", "--tokens", str(tmp_path / "tokens.json")
    ) as broker:
        line = ("pipeline", job, "--tables", tmp_path / "tables", "--broker", broker.url)
        refused = qmq(*line)
        assert (refused.exit_code, "refuses this token" in refused.stderr) == (2, True)
        done = qmq(*line, "--config", configured)
        assert done.exit_code == 0, done.output


def test_a_token_file_of_the_command_line_takes_the_place_of_the_configured_one(
    configured: Path, tmp_path: Path
) -> None:
    options = {
        "config_file": configured,
        "broker_url": "https://b",
        "token_file": None,
        "wait_s": 0,
    }
    broker = broker_of(options)
    assert broker is not None
    assert (broker.token_file, broker.ca_file) == (f"{tmp_path}/token", "/ca.pem")
    broker = broker_of({**options, "token_file": "other"})
    assert broker is not None
    assert (broker.token, broker.token_file, broker.ca_file) == ("", "other", "/ca.pem")
    assert broker_of({**options, "broker_url": None}) is None
