"""What `docs/migrations.md` shows works on every database: its files are written, its commands run."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from io import StringIO
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.config import CommandLine, Config
from click.testing import CliRunner

from qmq_client.commands.root import root
from qmq_client.doctor.drift import find_drift
from qmq_client.outbox.table import DEFAULT_TABLES, make_tables
from tests.conftest import MakeDatabase
from tests.migrations.schemas import live_schema
from tests.services.databases import KINDS, Database
from tests.tidy.house import ROOT
from tests.tidy.markdown import Block, blocks

PAGE = (ROOT / "docs" / "migrations.md").read_text(encoding="utf-8")
DOORS = PAGE.split("\n## ")
OURS = {"qmq_inbox", "qmq_order_lock", "qmq_outbox"}


class Application:
    """A folder that a reader fills by following the page."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self.database = database
        folder.mkdir()

    def follow(self, section: str, until: str = "") -> None:
        """Do what the blocks of a section say; stop before the command `until`."""
        for block in blocks(section):
            if block.language == "console":
                for line, shown in commands(block):
                    if until and line.startswith(until):
                        return
                    assert shown in self.run(line), line
            elif block.language in ("python", "ini"):
                name = block.text.splitlines()[0].removeprefix("# ")
                (self.folder / name).write_text(block.text)

    def run(self, line: str) -> str:
        """What a command prints; it must succeed."""
        words = shlex.split(os.path.expandvars(line))
        if words[0] == "qmq":
            done = CliRunner().invoke(root, words[1:])
            assert done.exit_code == 0, done.output
            return done.output
        assert words[0] == "alembic"
        printed = StringIO()
        alembic = CommandLine()
        options = alembic.parser.parse_args(words[1:])
        alembic.run_cmd(Config("alembic.ini", cmd_opts=options, stdout=printed), options)
        return printed.getvalue()

    def tables(self) -> set[str]:
        return set(sa.inspect(self.database.engine()).get_table_names())

    def is_sound(self) -> bool:
        with self.database.engine().connect() as connection:
            return find_drift(connection, DEFAULT_TABLES) == []


def commands(block: Block) -> list[tuple[str, str]]:
    """Each command line with what it is shown to print."""
    parts = block.text.strip().removeprefix("$ ").split("\n$ ")
    return [(line, shown) for line, _, shown in (part.partition("\n") for part in parts)]


def section(title: str) -> str:
    return next(part for part in DOORS if part.startswith(title))


@pytest.fixture
def application(
    tmp_path: Path, a_database: Database, monkeypatch: pytest.MonkeyPatch
) -> Application:
    made = Application(tmp_path / "application", a_database)
    monkeypatch.chdir(made.folder)
    monkeypatch.setenv("DATABASE_URL", a_database.url)
    monkeypatch.setattr(sys, "path", [str(made.folder), *sys.path])
    monkeypatch.delitem(sys.modules, "shop_tables", raising=False)
    # What "." on the path was for the application before this one.
    monkeypatch.delitem(sys.path_importer_cache, ".", raising=False)
    made.follow(DOORS[0])
    return made


def from_scratch(make_database: MakeDatabase, kind: str) -> dict[str, object]:
    engine = make_database(kind).engine()
    DEFAULT_TABLES.outbox.metadata.create_all(engine)
    return live_schema(engine)


def ours(database: Database) -> dict[str, object]:
    return {name: text for name, text in live_schema(database.engine()).items() if name in OURS}


def test_the_application_s_own_alembic_takes_our_tables_over(
    application: Application, make_database: MakeDatabase
) -> None:
    application.follow(section("1. "))
    assert application.tables() == OURS | {"orders", "alembic_version"}
    assert application.is_sound()
    assert ours(application.database) == from_scratch(make_database, application.database.kind)
    application.run("alembic downgrade base")
    assert application.tables() == {"alembic_version"}


def test_alembic_runs_in_an_application_whose_producer_is_made_at_import(
    application: Application,
) -> None:
    """Before its tables are there, and on the engine that the migrations use."""
    application.follow(section("1. "), until="alembic revision")
    tables, environment = application.folder / "shop_tables.py", Path("migrations/env.py")
    tables.write_text(
        tables.read_text().replace(
            "import sqlalchemy as sa\n", "import os\nimport sqlalchemy as sa\n"
        )
        + "import qmq_client\n"
        "engine = sa.create_engine(os.environ['DATABASE_URL'], poolclass=sa.NullPool)\n"
        "producer = qmq_client.Producer(engine, 'http://127.0.0.1:1', tables=messages)\n"
    )
    text = environment.read_text()
    made = next(line for line in text.splitlines() if line.startswith("engine = "))
    environment.write_text(text.replace(made, "from shop_tables import engine"))
    for line in ("revision --autogenerate -m all", "upgrade head", "check", "downgrade base"):
        application.run(f"alembic {line}")
    application.run("alembic upgrade head")
    assert application.tables() == OURS | {"orders", "alembic_version"}
    assert application.is_sound()


def test_several_metadata_are_compared_together(application: Application) -> None:
    application.follow(section("1. "), until="alembic revision")
    tables, environment = application.folder / "shop_tables.py", Path("migrations/env.py")
    tables.write_text(tables.read_text().replace("messages = make_tables(metadata)\n", ""))
    text = environment.read_text().replace("import os\n", "import os\nimport qmq_client\n")
    both = "target_metadata=[metadata, qmq_client.metadata]"
    environment.write_text(text.replace("target_metadata=metadata", both))
    for line in ("revision --autogenerate -m all", "upgrade head", "check"):
        application.run(f"alembic {line}")
    assert application.tables() == OURS | {"orders", "alembic_version"}
    assert application.is_sound()


def test_the_application_s_own_alembic_takes_a_schema_for_messages(
    application: Application, make_database: MakeDatabase
) -> None:
    kind = application.database.kind
    if kind == "sqlite":
        return  # knows no schemas
    schema = make_database(kind).name if kind == "mysql" else "messages"
    if kind == "postgresql":
        with application.database.engine().begin() as connection:
            connection.execute(sa.schema.CreateSchema(schema))
    application.follow(section("1. "), until="alembic revision")
    tables, environment = application.folder / "shop_tables.py", Path("migrations/env.py")
    given = f"make_tables(metadata, schema={schema!r})"
    tables.write_text(tables.read_text().replace("make_tables(metadata)", given))
    shown = next(b.text for b in blocks(section("1. ")) if b.text.startswith("# schemas.py"))
    text = environment.read_text().replace("engine =", f"{shown}\nengine =")
    options = "include_schemas=True, include_name=is_schema_of_ours, compare_type=True"
    text = text.replace("compare_type=True", options).replace('"messages"', repr(schema))
    environment.write_text(text)
    for line in ("revision --autogenerate -m all", "upgrade head", "check"):
        application.run(f"alembic {line}")
    assert application.tables() == {"orders", "alembic_version"}
    with application.database.engine().connect() as connection:
        assert find_drift(connection, make_tables(sa.MetaData(), schema=schema)) == []


def test_our_branch_runs_beside_the_application_s_own(
    application: Application, make_database: MakeDatabase
) -> None:
    application.follow(section("2. "), until="alembic downgrade")
    assert application.tables() == OURS | {"orders", "alembic_version"}
    assert application.is_sound()
    assert ours(application.database) == from_scratch(make_database, application.database.kind)
    application.run("alembic downgrade qmq@base")
    assert application.tables() == {"orders", "alembic_version"}


def test_our_branch_takes_a_prefix_from_the_application_s_configuration(
    application: Application,
) -> None:
    application.follow(section("2. "), until="alembic")
    with (application.folder / "alembic.ini").open("a") as file:
        file.write("\nqmq_prefix = shop_\n")
    application.run("alembic upgrade qmq@head")
    assert application.tables() == {"shop_inbox", "shop_order_lock", "shop_outbox"} | {
        "alembic_version"
    }


def test_the_command_alone(application: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    url = sa.make_url(application.database.url)
    if url.get_backend_name() != "sqlite":  # as a person writes it, without a driver
        plain = url.set(drivername=url.get_backend_name())
        monkeypatch.setenv("DATABASE_URL", plain.render_as_string(hide_password=False))
    name = Path(url.database or "").stem
    third = section("3. ").replace("shop:", f"{name}:").partition("### ")[0]
    application.follow(third)
    assert application.tables() == OURS | {"qmq_version"}
    assert application.is_sound()
    application.follow(section("When the tables").replace('"shop"', f'"{name}"'))


@pytest.mark.parametrize("kind", ["mysql", "postgresql"])
def test_messages_in_a_database_or_schema_of_their_own(
    make_database: MakeDatabase, kind: str, tmp_path: Path
) -> None:
    business, messages = make_database(kind), make_database(kind)
    shown = next(block for block in blocks(PAGE) if block.language == "toml")
    configured = tomllib.loads(shown.text)["database"][0]
    schema = messages.name if kind == "mysql" else configured["schema"]
    if kind == "postgresql":
        with business.engine().begin() as connection:
            connection.execute(sa.schema.CreateSchema(schema))
    text = shown.text.replace(configured["url"], business.url)
    text = text.replace(configured["schema"], schema).replace("password_env", "#")
    file = tmp_path / "qmq.toml"
    file.write_text(text)
    for command in ("migrate", "check"):
        done = CliRunner().invoke(root, ["db", command, "--config", str(file)])
        assert done.exit_code == 0, done.output
    inspector = sa.inspect(business.engine())
    assert inspector.get_table_names() == []
    assert set(inspector.get_table_names(schema)) == OURS | {"qmq_version"}


def test_the_page_shows_every_door() -> None:
    assert [part[:2] for part in DOORS if part[:1].isdigit()] == ["1.", "2.", "3."]
    assert set(KINDS) == {"sqlite", "mysql", "postgresql"}
