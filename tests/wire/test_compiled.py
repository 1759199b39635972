"""A wheel with the compiled modules: how it is built, and that they do what the Python does, to the byte."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from qmq_client.wire.limits import DEFAULT_LIMITS, Limits
from qmq_client.wire.record import encode_record
from tests.conftest import require, require_program
from tests.tidy.house import ROOT
from tests.wire.hostile import NAMES, TEXTS, examples, mutate, records, reseal_record
from tests.wire.outcomes import outcome

FOLDERS = ("broker", "watchdog", "migrations", "pipeline")
COMPILED = {"qmq_client/message", "qmq_client/wire/record"}
SMALL = Limits(record_bytes=150, tags=2, headers=2, headers_bytes=60)
LIMITS = st.sampled_from([DEFAULT_LIMITS, SMALL])
#: What no caller should give; each field gets it at times.
WRONG: list[Any] = [
    None, True, 0, -1, 8, 200, 2**63, 2**64, 2**70, 1.5, "", "a b", "\0", "\ud800", "é" * 200, b"", b"x" * 15,
    b"x" * 16, bytearray(16), (), ("a",), ["a"], ["a", "a,b"], (None,), (("a", "b"), ("a", "c")), (("a", 1),),
    (("a", "\ud800"),), (("n" * 128, ""),), {"a": "b"}, {"qmq-a": "b"}, {1: "b"}, bytes(2_000), bytes(3_000),
]  # fmt: skip
Ask = Callable[..., str]


def wheel_of(folder: Path, **environment: str) -> Path:
    """A wheel of this tree; raises `CalledProcessError`."""
    line = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
    ]
    surroundings = {name: value for name, value in os.environ.items() if name != "QMQ_BUILD_KERNEL"}
    subprocess.run(
        [*line, str(ROOT)],
        check=True,
        env={**surroundings, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    (wheel,) = folder.glob("qmq-*.whl")
    return wheel


def extensions_of(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name.partition(".")[0] for name in names if name.endswith((".so", ".pyd"))}


def python_headers() -> Path | None:
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return headers if headers.exists() else None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as anybody with a compiler builds it; a version that nobody has tried yet must be asked for."""
    require_program("gcc", "gcc")
    require("python3-dev", python_headers)
    asked = {"QMQ_BUILD_KERNEL": "1"} if sys.version_info >= (3, 14) else {}
    return wheel_of(tmp_path_factory.mktemp("compiled"), **asked)


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture(scope="module")
def ask(unpacked: Path) -> Iterator[Ask]:
    """Asks the compiled modules, in a process of their own, what they make of a case."""
    program = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.wire.outcomes"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(unpacked), str(ROOT)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    with program, program.stdin as asked, program.stdout as answers:

        def ask(*case: Any) -> str:
            pickle.dump(case, asked)
            asked.flush()
            is_compiled, found = pickle.load(answers)
            assert is_compiled
            return str(found)

        yield ask


def spoilt(values: tuple[Any, ...], wrong: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(wrong.get(place, value) for place, value in enumerate(values))


def test_a_wheel_has_the_compiled_modules_beside_the_python(wheel: Path, unpacked: Path) -> None:
    assert extensions_of(wheel) == COMPILED
    assert "-none-any" not in wheel.name
    assert all((unpacked / f"{name}.py").exists() for name in COMPILED)


def test_qmq_says_which_one_runs(unpacked: Path) -> None:
    line = [sys.executable, "-P", "-m", "qmq_client", "--version"]
    told = [
        subprocess.run(
            line, env={**os.environ, "PYTHONPATH": str(code)}, capture_output=True, text=True
        ).stdout
        for code in (unpacked, ROOT)
    ]
    assert [one.partition(" (")[2] for one in told] == ["codec: compiled)\n", "codec: Python)\n"]


@pytest.mark.parametrize(
    "environment",
    [{"QMQ_BUILD_KERNEL": "0"}, {"CC": "false"}],
    ids=["as asked for", "when the compiler fails"],
)
def test_a_wheel_without_compiled_modules_fits_every_python(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    wheel = wheel_of(tmp_path, **environment)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert extensions_of(wheel) == set()


def test_a_build_that_must_compile_and_cannot_fails(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        wheel_of(tmp_path, QMQ_BUILD_KERNEL="1", CC="false")
    assert "false" in caught.value.stderr


@examples(400)
@given(
    record=records(),
    body=st.none() | st.sampled_from([bytes(1_900), bytes(2_048), bytes(2_049), bytes(70_000)]),
    wrong=st.dictionaries(st.integers(0, 9), st.sampled_from(WRONG), max_size=2),
    limits=LIMITS,
)
def test_records_become_the_same_bytes_and_messages_or_errors(
    ask: Ask, record: Any, body: bytes | None, wrong: dict[int, Any], limits: Limits
) -> None:
    values = astuple(record) if body is None else spoilt(astuple(record), {2: body})
    values = spoilt(values, wrong)
    for case in (("encode", values, limits), ("to message", values)):
        assert ask(*case) == outcome(*case)


@examples(400)
@given(
    record=records(),
    random=st.randoms(use_true_random=False),
    is_resealed=st.booleans(),
    is_altered=st.booleans(),
    subject=st.none() | NAMES | st.sampled_from(WRONG),
)
def test_bytes_become_the_same_records_and_messages_or_errors(
    ask: Ask, record: Any, random: Any, is_resealed: bool, is_altered: bool, subject: Any
) -> None:
    data = encode_record(record)
    if is_altered:
        data = mutate(data, random)
    if is_resealed:
        data = reseal_record(record.subject, data)
    subject = record.subject if subject is None else subject
    for call in ("decode", "decode message", "verify"):
        assert ask(call, subject, data) == outcome(call, subject, data)


@pytest.mark.parametrize("data", [None, "", b"", bytes(35), bytearray(36), 5])
def test_what_is_no_record_is_the_same_error(ask: Ask, data: Any) -> None:
    assert ask("decode", "orders", data) == outcome("decode", "orders", data)


@examples(400)
@given(
    fields=st.fixed_dictionaries(
        {"subject": NAMES},
        optional={
            "body": st.binary(max_size=99) | TEXTS | st.dictionaries(TEXTS, st.integers()),
            "key": TEXTS,
            "tags": st.lists(NAMES, max_size=4).map(tuple),
            "headers": st.dictionaries(NAMES, TEXTS, max_size=4),
            "message_id": st.binary(min_size=16, max_size=16).map(bytes.hex),
            "dedupe_key": TEXTS,
            "delay": st.floats(-10, 10**9) | st.integers(-10, 10**9),
            "deliver_at": st.datetimes(),
            "ttl": st.floats(-10, 10**9) | st.integers(-10, 10**9),
            "expires_at": st.datetimes(),
        },
    ),
    wrong=st.dictionaries(
        st.sampled_from(
            ["subject", "body", "key", "tags", "headers", "message_id", "delay", "ttl"]
        ),
        st.sampled_from(WRONG),
        max_size=2,
    ),
    limits=LIMITS,
)
def test_messages_become_the_same_bytes_or_errors(
    ask: Ask, fields: dict[str, Any], wrong: dict[str, Any], limits: Limits
) -> None:
    for call in ("to record", "encode message"):
        case = (call, {**fields, **wrong}, limits)
        assert ask(*case) == outcome(*case)


def test_the_tests_of_the_wire_and_of_golden_bytes_pass_with_the_compiled_modules(
    unpacked: Path,
) -> None:
    path = " ".join([str(unpacked), ".", *FOLDERS])
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={path}",
    ]
    ran = subprocess.run(
        [*line, "--ignore", __file__, "tests/wire", "tests/golden"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4_000:] + ran.stderr
