"""The import contracts of pyproject.toml bite: shown on an invented house with one wrong import each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.house import PACKAGES, ROOT

#: Name of the broken contract → a module of the invented house and what it wrongly imports.
PLANTED = {
    "Watchdog and broker stand side by side": ("qmq_watchdog/sweep.py", "qmq_broker.service"),
    "Floors of the client": ("qmq_client/wire/frame.py", "qmq_client.producer"),
    "Rooms of the outbox": (
        "qmq_client/outbox/database/__init__.py",
        "qmq_client.outbox.committed",
    ),
    "Floors of publishing": ("qmq_client/publishing/publish.py", "qmq_client.publishing.publisher"),
    "Floors of the broker": ("qmq_broker/storage/store.py", "qmq_broker.service"),
    "Rooms of the broker's face": ("qmq_broker/face/routes/hot.py", "qmq_broker.face.server"),
    "Rooms of the storage": ("qmq_broker/storage/recovery.py", "qmq_broker.storage.store"),
    "Of the client the broker knows only wire, the state of a group, certificate, and clock": (
        "qmq_broker/face/app.py",
        "qmq_client.outbox",
    ),
    "no SQL": ("qmq_broker/service/intake.py", "sqlalchemy"),
    "Floors of the pipeline": ("qmq_pipeline/rows/decode.py", "qmq_pipeline.sources"),
    "only the readers of its files": ("qmq_pipeline/rows/decode.py", "qmq_broker.face"),
    "Spark and Arrow are the pipeline's affair": ("qmq_broker/storage/store.py", "pyarrow"),
    "made for tests": ("qmq_watchdog/sweep.py", "qmq_client.testing"),
}
HOUSE = (
    "qmq_client/wire",
    "qmq_client/outbox",
    "qmq_client/outbox/database",
    "qmq_client/outbox/committed",
    "qmq_client/publishing",
    "qmq_client/publishing/publisher.py",
    "qmq_client/testing",
    "qmq_client/producer.py",
    "qmq_broker/storage",
    "qmq_broker/storage/store.py",
    "qmq_broker/service",
    "qmq_broker/face",
    "qmq_broker/face/routes",
    "qmq_broker/face/server.py",
    "qmq_pipeline/errors.py",
    "qmq_pipeline/rows",
    "qmq_pipeline/sources",
)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Build packages with the right names and nothing in them."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in [*PACKAGES, *HOUSE]:
        module = tmp_path / name if name.endswith(".py") else tmp_path / name / "__init__.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.touch()
    (tmp_path / "qmq_broker/face/answers.py").write_text("import qmq_client.wire\n")
    return tmp_path


def broken_contracts(house: Path) -> list[str]:
    """Return the names of the contracts that import-linter finds broken."""
    outcome = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert "Contracts: " in outcome.stdout, outcome.stdout + outcome.stderr
    return re.findall(r"^(.+) BROKEN", outcome.stdout, re.MULTILINE)


def test_a_right_house_keeps_every_contract(house: Path) -> None:
    assert broken_contracts(house) == []


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(house: Path, contract: str) -> None:
    module, imported = PLANTED[contract]
    (house / module).write_text(f"import {imported}\n")
    assert [name for name in broken_contracts(house) if contract in name]


@pytest.mark.parametrize("package", ["client", "broker"])
def test_a_module_without_a_floor_is_found(house: Path, package: str) -> None:
    (house / f"qmq_{package}" / "newcomer.py").touch()
    assert broken_contracts(house) == [f"Floors of the {package}"]
