"""The demo's last step: its own run as tables on Spark, audited, and a report to look at.

The judge (`judge.py`) knows what the services did. The pipeline knows nothing of them: it reads the
broker's files and the outbox as it would anywhere, by the command that a user types. Where there is no
Spark or no Java the demo says so in one line, and its exit code is what it would have been.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from examples.flights.plan import BOARD, Plan
from examples.flights.process import REPOSITORY

#: Found by every command of the product; a password in the address is seen by nobody else there.
DATABASE_VARIABLE = "QMQ_DATABASE_URL"
KEEP_VARIABLE = "QMQ_DATABASE_KEEP_SENT_S"
#: Where the report of a run stays whose own folder goes away.
REPORT = REPOSITORY / ".cache" / "flights-report.html"
#: What the extra `pipeline` brings.
NEEDED = ("pyspark", "pyarrow", "numpy", "pandas")
#: What the commands say by their exit code: see docs/pipeline.md.
_CLEAN, _FINDINGS, _WRONG_CALL = 0, 1, 2
#: A machine may be slow, and the broker was away: how late a message was is not judged here.
_LATE_S = 86_400
#: Of so few days there are some thousand messages: to compile for them takes longer than it saves.
_FEW_DAYS = 10
_NOT_COMPILED = {
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "PYSPARK_SUBMIT_ARGS": "--conf spark.sql.codegen.wholeStage=false "
    "--conf spark.sql.codegen.factoryMode=NO_CODEGEN pyspark-shell",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the pipeline says of a run."""

    #: Why there is none; None when there is.
    missing: str | None = None
    #: It ran, and could not go on.
    failure: str | None = None
    #: The audit, as `qmq pipeline run --json` tells it.
    audit: dict[str, Any] = field(default_factory=dict)
    report: Path | None = None

    @property
    def ok(self) -> bool:
        """Nothing was found, as far as it could be looked for."""
        return self.failure is None and not any(self.audit.get("findings", {}).values())

    def lines(self) -> list[str]:
        """What the demo prints of it."""
        if self.missing is not None:
            return [f"no audit by Spark: {self.missing}"]
        if self.failure is not None:
            return [f"[bold red]the audit by Spark failed:[/] {self.failure}"]
        audit = self.audit
        found = ", ".join(f"{count:,} {kind}" for kind, count in audit["findings"].items())
        verdict = "[bold green]clean" if self.ok else "[bold red]FINDINGS"
        return [
            f"audit by Spark: {audit['committed']:,} committed, {audit['stored']:,} stored, "
            f"{audit['delivered']:,} of {audit['expected']:,} delivered; {found}: {verdict}",
            *([f"report: {self.report}"] if self.report is not None else []),
        ]


def why_missing(needed: Sequence[str] = NEEDED) -> str | None:
    """Why the pipeline cannot run here, in a few words; None when it can."""
    absent = [name for name in needed if find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed; pip install 'qmq[pipeline,pipeline-java]'"
    from pyspark import __version__

    from qmq_pipeline.errors import JavaError
    from qmq_pipeline.spark.session import cache_folder, find_java

    major, minor = (int(part) for part in __version__.split(".")[:2])
    try:
        find_java(os.environ, (major, minor), cache_folder(os.environ))
    except JavaError as error:
        return str(error)
    return None


def prove(plan: Plan, *, is_kept: bool) -> Proof:
    """Bring the run into tables, audit it, and write the report; into the run's folder if that `is_kept`.

    Requires: every process of the run has stopped.
    """
    missing = why_missing()
    if missing is not None:
        return Proof(missing=missing)
    command = [sys.executable, "-m", "qmq_client", "pipeline", "run", "--json"]
    command += ["--tables", str(plan.path("tables")), "--path", str(plan.path("broker"))]
    report = plan.path("report.html") if is_kept else REPORT
    command += ["--out", str(report)]
    command += ["--grace", "0", "--late", str(_LATE_S)]
    quick = _NOT_COMPILED if len(plan.months) * plan.days <= _FEW_DAYS else {}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**quick, **os.environ, **database_environment(plan)},
        stdout=subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else subprocess.PIPE,  # a person sees how far it is
        text=True,
        check=False,
    )
    if done.returncode in (_CLEAN, _FINDINGS) and done.stdout.startswith("{"):
        return Proof(audit=json.loads(done.stdout)["audit"], report=report)
    said = (done.stderr or "").strip().splitlines()
    reason = said[-1] if said else f"exit code {done.returncode}"
    if done.returncode == _WRONG_CALL:
        return Proof(missing=reason)
    return Proof(failure=reason)


def database_environment(plan: Plan) -> dict[str, str]:
    """How the product's commands are told of the departures service's database."""
    kept = {KEEP_VARIABLE: str(plan.keep_sent_s)} if plan.keep_sent_s else {}
    return {DATABASE_VARIABLE: plan.databases[BOARD], **kept}
