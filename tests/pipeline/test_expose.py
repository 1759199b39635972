"""The tables as Delta and Iceberg: the same files, listed once more, read by those formats' own libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable

from qmq_client.commands.root import root
from qmq_pipeline.errors import LakeError, OptionError
from qmq_pipeline.jobs.expose import expose
from qmq_pipeline.places.config import ExposeOptions, PipelineConfig
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import Lake
from qmq_pipeline.tables.listing import Change, Listing, update
from qmq_pipeline.tables.schemas import DEAD_LETTERS, MESSAGES
from qmq_pipeline.tables.table import Table
from tests.pipeline.exposed import CATALOG, VALUES, Row, World, a_world, batch
from tests.pipeline.object_store import object_store


@pytest.fixture(params=["delta", "iceberg"])
def form(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path, tmp_path / "warehouse") as made:
        yield made


def commit(world: World, table: Table, first: int, after: int) -> None:
    """One more range of a bronze table."""
    path = f"day=2026-01-31/{first:05d}-{after:05d}.parquet"
    file = world.write(table, path, range(first, after))
    facts = RangeFacts(source="store", first=first, next=after, rows=file.rows, files=(file,))
    world.lake.commit(table, [facts])


def test_both_formats_give_the_committed_rows_of_all_kinds_and_copy_none(
    world: World, form: str
) -> None:
    commit(world, MESSAGES, 0, 40)
    world.parts(DEAD_LETTERS, "1", {"a": range(10), "b%3A c+ä": range(10, 15)})
    # A file that was written and not committed is in no table.
    world.write(MESSAGES, "day=2026-01-31/00040-00050.parquet", range(40, 50))
    before = data_files(world)
    done = world.expose(form).tables
    assert {name: (one.rows, one.added, one.removed) for name, one in done.items()} == {
        "messages": (40, 1, 0),
        "dead_letters": (15, 2, 0),
    }
    for table in (MESSAGES, DEAD_LETTERS):
        assert world.read(form, table) == world.committed(table)
    assert len(world.read(form, MESSAGES)) == 40
    assert data_files(world) == before
    again = world.expose(form).tables.values()
    assert [(one.added, one.removed) for one in again] == [(0, 0), (0, 0)]


def data_files(world: World) -> list[tuple[str, int]]:
    found = Path(world.lake.root).rglob("*.parquet")
    return sorted((str(one), one.stat().st_mtime_ns) for one in found)


def test_a_second_time_lists_what_is_new_and_nothing_when_nothing_is(
    world: World, form: str
) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose(form)
    versions = world.versions(form, MESSAGES)
    assert world.expose(form).tables["messages"].added == 0
    assert world.versions(form, MESSAGES) == versions
    commit(world, MESSAGES, 10, 30)
    assert world.expose(form).tables["messages"].added == 1
    assert world.versions(form, MESSAGES) == versions + 1
    assert [row["sequence"] for row in sorted(world.read(form, MESSAGES), key=by_number)] == list(
        range(30)
    )


def by_number(row: Row) -> int:
    number: int = row["sequence"]
    return number


def test_parts_made_anew_change_in_one_step_and_what_is_listed_is_never_swept(
    world: World, form: str
) -> None:
    world.parts(DEAD_LETTERS, "1", {"a": range(10), "b": range(10, 20)})
    world.expose(form)
    before, versions = world.read(form, DEAD_LETTERS), world.versions(form, DEAD_LETTERS)
    world.parts(DEAD_LETTERS, "2", {"a": range(5)})
    world.parts(DEAD_LETTERS, "3", {"a": range(6)})
    # Two runs later what is listed is still there, and readers see the state before them.
    assert world.read(form, DEAD_LETTERS) == before
    done = world.expose(form).tables["dead_letters"]
    assert (done.added, done.removed, done.rows) == (1, 1, 16)
    assert world.versions(form, DEAD_LETTERS) == versions + 1
    assert world.read(form, DEAD_LETTERS) == world.committed(DEAD_LETTERS) != before
    world.lake.sweep(DEAD_LETTERS)
    assert len(data_files(world)) == 2, "what is neither committed nor listed goes"
    assert world.read(form, DEAD_LETTERS) == world.committed(DEAD_LETTERS)


class Dying:
    """A listing whose program is killed at its change: before it counts, or right after."""

    def __init__(self, listing: Listing, *, has_changed: bool) -> None:
        self.name, self.kept_as = listing.name, listing.kept_as
        self.files = listing.files
        self._change = listing.apply if has_changed else None

    def apply(self, change: Change) -> None:
        if self._change is not None:
            self._change(change)
        raise KeyboardInterrupt


@pytest.mark.parametrize("has_changed", [False, True])
def test_a_run_that_dies_beside_the_change_leaves_all_readable_and_the_next_one_ends_it(
    world: World, form: str, has_changed: bool
) -> None:
    world.parts(DEAD_LETTERS, "1", {"a": range(10)})
    world.expose(form)
    world.parts(DEAD_LETTERS, "2", {"a": range(4)})
    dying = Dying(world.listing(form, DEAD_LETTERS), has_changed=has_changed)
    with pytest.raises(KeyboardInterrupt):
        update(world.lake, DEAD_LETTERS, dying)
    for run in ("3", "4"):  # after which no commit names what is listed
        world.parts(DEAD_LETTERS, run, {"a": range(6)})
    assert len(world.read(form, DEAD_LETTERS)) == (4 if has_changed else 10)
    done = world.expose(form).tables["dead_letters"]
    assert (done.added, done.removed, done.rows) == (1, 1, 6)
    assert world.read(form, DEAD_LETTERS) == world.committed(DEAD_LETTERS)
    world.lake.sweep(DEAD_LETTERS)
    assert len(data_files(world)) == 1


def test_what_any_listing_names_is_never_swept_for_another_one(world: World, form: str) -> None:
    """Two catalogs, or namespaces, may have the same table, and be brought up to date at other times."""

    def rows(namespace: str) -> int:
        found = world.catalog.load_table(f"{namespace}.dead_letters")
        count: int = found.scan().to_arrow().num_rows
        return count

    def listed(*namespaces: str) -> None:
        for one in namespaces:
            update(world.lake, DEAD_LETTERS, world.listing("iceberg", DEAD_LETTERS, one))

    world.parts(DEAD_LETTERS, "1", {"a": range(10), "b": range(10, 20)})
    listed("one.two", "one")
    world.parts(DEAD_LETTERS, "2", {"a": range(5)})
    listed("one")
    if form == "delta":
        world.expose(form)
    world.parts(DEAD_LETTERS, "3", {"a": range(6)})
    assert (rows("one.two"), rows("one")) == (20, 15)
    listed("one", "one.two")
    world.lake.sweep(DEAD_LETTERS)
    assert (rows("one.two"), rows("one")) == (16, 16)
    assert len(data_files(world)) == (3 if form == "delta" else 2)


def test_a_table_without_rows_is_there_and_empty(world: World, form: str) -> None:
    world.lake.commit(DEAD_LETTERS, [], name="1")
    world.expose(form)
    assert world.read(form, DEAD_LETTERS) == []


def test_a_column_that_is_new_is_null_in_older_files(world: World, form: str) -> None:
    older = replace(MESSAGES, columns=MESSAGES.columns[:-2], version=0)
    file = world.lake.write(older, "old.parquet", [batch(older, range(3))])
    facts = RangeFacts(source="store", first=0, next=3, rows=3, files=(file,))
    world.lake.commit(MESSAGES, [facts])
    world.listing(form, older).apply(Change(commit="1", added=[file], removed=[]))
    commit(world, MESSAGES, 3, 6)
    world.expose(form)
    rows = sorted(world.read(form, MESSAGES), key=by_number)
    assert [row["body"] for row in rows] == [None, None, None, b"\x00\xff", None, b"\x00\xff"]


def test_a_file_written_anew_under_its_name_is_listed_anew(world: World, form: str) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose(form)
    path = "day=2026-01-31/00000-00010.parquet"
    file = world.write(MESSAGES, path, range(500))
    facts = RangeFacts(source="store", first=0, next=10, rows=file.rows, files=(file,))
    world.lake.commit(MESSAGES, [facts])
    done = world.expose(form).tables["messages"]
    assert (done.added, done.removed, done.rows) == (1, 1, 500)
    assert len(world.read(form, MESSAGES)) == 500


def test_a_second_run_at_the_same_time_is_refused(world: World, form: str) -> None:
    commit(world, MESSAGES, 0, 10)
    with world.lake.writing(), pytest.raises(LakeError, match="another run writes these tables"):
        world.expose(form)
    assert world.listing(form, MESSAGES).files() is None


def test_what_others_did_to_the_listing_is_undone(world: World) -> None:
    for first in (0, 10, 20):
        commit(world, MESSAGES, first, first + 10)
    world.expose("delta")
    folder = world.lake.url(world.lake.folder(MESSAGES))
    DeltaTable(folder).optimize.compact()
    assert len(DeltaTable(folder).file_uris()) == 1
    done = world.expose("delta").tables["messages"]
    assert (done.added, done.removed) == (3, 1)
    assert world.read("delta", MESSAGES) == world.committed(MESSAGES)


def test_a_vacuum_spares_what_is_not_listed_yet(world: World) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose("delta")
    commit(world, MESSAGES, 10, 20)
    table = DeltaTable(world.lake.url(world.lake.folder(MESSAGES)))
    assert table.vacuum(dry_run=False, full=True) == []
    assert len(world.committed(MESSAGES)) == 20


def test_the_log_of_delta_tells_by_what_to_skip_files(world: World) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose("delta")
    table = DeltaTable(world.lake.url(world.lake.folder(MESSAGES)))
    (told,) = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert told["num_records"] == 10
    assert (told["min.sequence"], told["max.sequence"]) == (0, 9)
    assert (told["min.subject"], told["max.subject"]) == ("subject 0", "subject 2")
    assert told["max.stored_at"].timestamp() == pytest.approx(VALUES["time"] / 1e6)
    # The key of a header is no value of the column `key`, which has a value in half of the rows.
    assert (told["max.key"], told["null_count.key"]) == ("ä", 5)


def test_the_catalog_is_told_to_leave_the_files_alone(world: World) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose("iceberg")
    assert world.catalog.load_table("qmq.messages").properties["gc.enabled"] == "false"


def test_the_table_of_another_folder_is_not_touched(world: World, tmp_path: Path) -> None:
    commit(world, MESSAGES, 0, 10)
    world.expose("iceberg")
    other = World(Lake(str(tmp_path / "other")), world.catalog)
    other.lake.prepare()
    commit(other, MESSAGES, 0, 20)
    with pytest.raises(LakeError, match=r"qmq\.messages: .*is of .*/tables.*--namespace"):
        other.expose("iceberg")
    assert len(world.read("iceberg", MESSAGES)) == 10


def test_times_that_iceberg_does_not_take_are_refused_with_a_remedy(world: World) -> None:
    file = world.write(DEAD_LETTERS, "a.parquet", range(3))
    path = Path(world.lake.root, world.lake.folder(DEAD_LETTERS), file.path)
    pq.write_table(pq.ParquetFile(path).read(), path, use_deprecated_int96_timestamps=True)
    file = replace(file, bytes=path.stat().st_size)
    facts = RangeFacts(source="a", first=0, next=0, rows=3, files=(file,))
    world.lake.commit(DEAD_LETTERS, [facts], name="1")
    with pytest.raises(LakeError, match=r"older version.*--full"):
        world.expose("iceberg")
    world.expose("delta")
    assert len(world.read("delta", DEAD_LETTERS)) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "hudi"}, "allowed: delta or iceberg"),
        ({"format": "delta", "tables": ("message",)}, "option --table: message; allowed: messages"),
        ({"format": "iceberg", "namespace": ""}, 'option --namespace: ""; allowed: a name'),
        ({"format": "iceberg", "namespace": "../up"}, "several joined by dots"),
        (
            {"format": "iceberg", "catalog": "nowhere"},
            "option --catalog: nowhere.*PYICEBERG_CATALOG",
        ),
    ],
)
def test_what_is_not_known_is_refused(world: World, change: dict[str, Any], said: str) -> None:
    commit(world, MESSAGES, 0, 10)
    with pytest.raises(OptionError, match=said):
        expose(PipelineConfig(tables=world.lake.root), ExposeOptions(**change))


@pytest.mark.parametrize("command", [("expose", "--as"), ("run", "--expose")])
def test_without_its_package_a_format_is_refused_before_anything_is_done(
    world: World, form: str, command: tuple[str, str]
) -> None:
    package = {"delta": "deltalake", "iceberg": "pyiceberg"}[form]
    program = (
        f"import sys; sys.modules[{package!r}] = None; from qmq_client.cli import main; main()"
    )
    verb, option = command
    line = ["pipeline", verb, "--tables", str(Path(world.lake.root, "none")), option, form]
    done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{package} is not installed" in done.stderr
    assert f'pip install "qmq[pipeline-{form}]"' in done.stderr
    assert "\n" not in done.stderr.strip()


def test_a_catalog_is_found_in_the_configuration_of_pyiceberg(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(world, MESSAGES, 0, 10)
    prefix = f"PYICEBERG_CATALOG__{CATALOG.upper()}__"
    for name in ("type", "uri", "warehouse"):
        monkeypatch.setenv(prefix + name.upper(), world.catalog.properties[name])
    qmq = str(Path(sys.executable).with_name("qmq"))
    where = ("--catalog", CATALOG, "--namespace", "events")
    output(qmq, "pipeline", "expose", "--tables", world.lake.root, "--as", "iceberg", *where)
    assert world.catalog.load_table("events.messages").scan().to_arrow().num_rows == 10


def test_a_folder_without_tables_is_refused_and_not_made(tmp_path: Path) -> None:
    config = PipelineConfig(tables=str(tmp_path / "none"))
    with pytest.raises(LakeError, match="there are no tables here"):
        expose(config, ExposeOptions(format="delta"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ein Ördner", "a %20b"])
def test_a_folder_may_have_any_name_that_the_library_can_read(tmp_path: Path, name: str) -> None:
    lake = Lake(str(tmp_path / name))
    lake.prepare()
    file = lake.write(MESSAGES, "a b+ü%41.parquet", [batch(MESSAGES, range(3))])
    facts = RangeFacts(source="store", first=0, next=3, rows=3, files=(file,))
    lake.commit(MESSAGES, [facts])
    config, options = PipelineConfig(tables=lake.root), ExposeOptions(format="delta")
    if "%" in name:
        with pytest.raises(LakeError, match="Move the tables to a folder without a %"):
            expose(config, options)
        return
    expose(config, options)
    assert DeltaTable(f"{lake.root}/bronze/messages").to_pyarrow_table().num_rows == 3


def test_the_command_says_what_it_listed_and_where(world: World) -> None:
    commit(world, MESSAGES, 0, 10)
    line = ["pipeline", "expose", "--tables", world.lake.root, "--as", "delta"]
    invoke = CliRunner().invoke
    told = json.loads(invoke(root, [*line, "--json"]).stdout)
    where = f"{world.lake.root}/bronze/messages"
    assert told == {"tables": {"messages": {"where": where, "rows": 10, "added": 1, "removed": 0}}}
    assert "exposed 1 tables as delta, 10 rows: 0 files added" in invoke(root, line).stdout
    wrong = invoke(root, [*line, "--table", "letters"])
    assert wrong.exit_code == 2
    assert "--table: letters" in wrong.stderr


def test_delta_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own: the library lets no other thread of Python work while it waits for an answer."""
    (tmp_path / "bucket").mkdir()
    url = "s3a://bucket/some/tables"
    # Not by pyarrow: with the library's files beneath, its threads may end a process that is done with SIGABRT.
    program = """if True:
        import sys
        from deltalake import DeltaTable, QueryBuilder

        query = QueryBuilder().register("read", DeltaTable(sys.argv[1]))
        print(query.execute("SELECT message_id FROM read").read_all().num_rows)
    """
    with object_store(tmp_path) as environment:
        for name, value in {**environment, "AWS_ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(name, value)
        lake = Lake(url)
        lake.prepare()
        for rows in (10, 20):
            path = f"{rows}.parquet"
            file = lake.write(MESSAGES, path, [batch(MESSAGES, range(10))])
            facts = RangeFacts(source="store", first=rows, next=rows + 10, rows=10, files=(file,))
            lake.commit(MESSAGES, [facts])
            qmq = str(Path(sys.executable).with_name("qmq"))
            told = output(qmq, "pipeline", "expose", "--tables", url, "--as", "delta", "--json")
            assert json.loads(told)["tables"]["messages"]["added"] == 1
            assert int(output(sys.executable, "-c", program, f"{url}/bronze/messages")) == rows


def output(*line: str) -> str:
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=90).stdout
