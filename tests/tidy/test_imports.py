"""What an import brings with it: seen in a fresh process, because this one has loaded everything."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.house import Source, product

DRIVERS = {
    "sqlite3", "aiosqlite", "pymysql", "MySQLdb", "asyncmy", "psycopg", "psycopg2", "asyncpg",
}  # fmt: skip
FRAMEWORKS = {"starlette", "uvicorn", "fastapi", "flask", "django"}
SPARK = {"pyspark", "pyarrow", "pandas", "numpy"}

#: Wire and group compute; they neither wait, read the clock, nor open anything.
PURE_MAY_USE = {
    "__future__", "array", "binascii", "bisect", "collections", "dataclasses", "enum", "functools",
    "hashlib", "heapq", "ipaddress", "itertools", "json", "operator", "re", "string", "struct", "types", "typing",
    "unicodedata", "zlib", "fastcrc", "msgspec", "qmq_client",
}  # fmt: skip

LIST_MODULES = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
IMPORT_WHOLE_BROKER = """
import importlib, pkgutil, qmq_broker
for found in pkgutil.walk_packages(qmq_broker.__path__, "qmq_broker."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


def loaded_by(statement: str) -> set[str]:
    """Return the top-level names in `sys.modules` of a new process after the statement."""
    program = f"{statement}\n{LIST_MODULES}"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    return set(output.split())


def impure(source: Source) -> list[str]:
    faults = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in PURE_MAY_USE:
                faults.append(f"{source.path}:{node.lineno} imports {name}")
    return faults


WITHOUT_GREENLET = """
import sys
sys.modules["greenlet"] = None  # importing it raises ImportError
from qmq_client import *
import sqlalchemy as sa
from qmq_client.testing import MemoryBroker, MemoryTransport, drain

engine = sa.create_engine(f"sqlite:///{sys.argv[1]}/shop.db")
create_tables(engine)
transport = MemoryTransport(MemoryBroker())

@consumer("orders", group="audit", inbox=engine)
def audit(body: str) -> None: ...

with Producer(engine, transport) as producer:
    producer.send_now(Message("orders", "17"))
    assert producer.flush()
    assert drain(Consumers([audit], transport)).handled == 1
"""


def test_all_public_names_and_a_plain_program_work_without_greenlet(tmp_path: Path) -> None:
    program = [sys.executable, "-c", WITHOUT_GREENLET, str(tmp_path)]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_import_qmq_client_loads_no_driver_framework_or_spark() -> None:
    assert loaded_by("import qmq_client") & (DRIVERS | FRAMEWORKS | SPARK) == set()


def test_the_wire_and_the_whole_broker_load_no_sqlalchemy() -> None:
    assert "sqlalchemy" not in loaded_by("import qmq_client.wire" + IMPORT_WHOLE_BROKER)


def test_a_session_is_told_of_the_sources_without_what_reading_needs() -> None:
    """Each start of a session pays for it, and each process in which Spark asks for a reader once more."""
    sources = "import pyspark_qmq, pyspark_qmq_outbox, qmq_pipeline.sources.register"
    assert loaded_by(sources) & {"sqlalchemy", "httpx", "pyarrow", "numpy", "msgspec"} == set()
    assert {"pyspark", "qmq_pipeline"} <= loaded_by(sources)
    assert "httpx" not in loaded_by("import qmq_pipeline.sources.log_batches")


@pytest.mark.parametrize("package", ["wire", "group"])
def test_the_wire_and_the_group_stand_on_computation_alone(package: str) -> None:
    sources = [source for source in product("qmq_client") if f"/{package}/" in source.path]
    assert sources
    assert [fault for source in sources for fault in impure(source)] == []


def test_a_planted_import_is_found() -> None:
    assert {"sqlite3", "sqlalchemy"} <= loaded_by("import sqlite3, sqlalchemy")
    assert "sqlite3" not in loaded_by("pass")
    planted = Source(
        path="a.py", text="import struct\nimport os.path\nfrom time import monotonic\n"
    )
    assert impure(planted) == ["a.py:2 imports os.path", "a.py:3 imports time"]
