"""Tables whose names need quotes, and mean something to a driver: found and mended like any others."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from qmq_client.doctor import examine
from qmq_client.outbox.table import create_tables, make_tables
from tests.client.doctor.ward import ids, run
from tests.conftest import MakeDatabase

TABLES = make_tables(sa.MetaData(), prefix="50%_'s ")
FUNCTION = "CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
#: A percent sign as each driver takes it.
MARKS = {"sqlite": "%", "mysql": "%%", "postgresql": "%%"}
#: Check, kind of database, what is planted there.
PLANTED = [
    (
        "table.trigger",
        "sqlite",
        [
            """CREATE TRIGGER veto BEFORE DELETE ON "50%_'s outbox" BEGIN SELECT RAISE(IGNORE); END""",
        ],
    ),
    ("table.engine", "mysql", ["ALTER TABLE `50%_'s inbox` ENGINE=MyISAM"]),
    ("column.type", "mysql", ["ALTER TABLE `50%_'s outbox` MODIFY COLUMN record BLOB NOT NULL"]),
    ("table.key", "mysql", ["ALTER TABLE `50%_'s outbox` DROP INDEX message_id"]),
    ("table.unlogged", "postgresql", ["""ALTER TABLE "50%_'s inbox" SET UNLOGGED"""]),
    (
        "column.type",
        "postgresql",
        [
            """ALTER TABLE "50%_'s outbox" ALTER COLUMN subject TYPE VARCHAR(30) COLLATE "C" """,
        ],
    ),
    (
        "table.key",
        "postgresql",
        ["""ALTER TABLE "50%_'s outbox" DROP CONSTRAINT "50%_'s outbox_message_id_key" """],
    ),
    (
        "table.trigger",
        "postgresql",
        [
            FUNCTION,
            """CREATE TRIGGER veto BEFORE DELETE ON "50%_'s outbox" """
            "FOR EACH ROW EXECUTE FUNCTION veto()",
        ],
    ),
    (
        "table.trigger",
        "postgresql",
        ["""CREATE RULE veto AS ON DELETE TO "50%_'s inbox" DO INSTEAD NOTHING"""],
    ),
]


@pytest.mark.parametrize(("check", "kind", "planted"), PLANTED)
def test_X1_what_is_wrong_with_a_table_of_an_odd_name_is_found_and_gone_after_its_fix(
    make_database: MakeDatabase, check: str, kind: str, planted: list[str]
) -> None:
    engine = make_database(kind).engine(poolclass=NullPool)
    create_tables(engine, TABLES)
    assert ids(examine(engine, tables=TABLES)) == []
    with engine.begin() as connection:
        for statement in planted:
            connection.exec_driver_sql(statement.replace("%", MARKS[kind]))
    (finding,) = examine(engine, tables=TABLES)
    assert finding.id == check
    run(engine, finding.fix)
    assert ids(examine(engine, tables=TABLES)) == []
