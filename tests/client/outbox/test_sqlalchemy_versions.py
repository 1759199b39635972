"""The outbox stands on the public interface of SQLAlchemy; each series is tried.

Only before a release: the other series is installed beside the environment, and the tests of the
outbox run with it in a process of their own. (`dev.py test tests/client/outbox --release`)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa

ROOT: Final = Path(__file__).resolve().parents[3]
OTHER: Final = "sqlalchemy<2.1" if sa.__version__.startswith("2.1") else "sqlalchemy>=2.1,<2.2"
TESTS: Final = ("tests/client/outbox", "tests/client/test_transactional.py")


@pytest.mark.timeout(3600)
def test_S1_the_tests_of_the_outbox_hold_with_the_other_series_of_sqlalchemy(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--release"):
        pytest.skip("only before a release")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), OTHER]
    subprocess.run(install, check=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    environment["PYTHONPATH"] = str(tmp_path)
    asked = f"import sqlalchemy; assert sqlalchemy.__version__ != {sa.__version__!r}"
    subprocess.run([sys.executable, "-c", asked], check=True, env=environment)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
