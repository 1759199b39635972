"""What others have put on our tables: found on each database that can have it, and gone after its fix."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from qmq_client.doctor import examine
from qmq_client.outbox.committed.settling import UNDELETED
from tests.client.doctor.test_tables import put_row, shop_of
from tests.client.doctor.ward import a_server, a_shop, command, finding_of, ids, mend, run
from tests.conftest import MakeDatabase
from tests.services.databases import Database, Databases

FUNCTION = "CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NULL; END$$"
#: Kind of database, what is planted, and what is read of it.
PLANTED = [
    (
        "sqlite",
        ['CREATE TRIGGER "the Veto" BEFORE DELETE ON qmq_outbox BEGIN SELECT RAISE(IGNORE); END'],
        "trigger the Veto on qmq_outbox",
    ),
    (
        "mysql",
        [
            "CREATE TRIGGER `the Veto` BEFORE DELETE ON qmq_inbox FOR EACH ROW "
            "SIGNAL SQLSTATE '45000'"
        ],
        "trigger the Veto on qmq_inbox",
    ),
    (
        "mysql",
        [
            "CREATE TABLE audit_log (message_id BINARY(16), "
            "CONSTRAINT refers FOREIGN KEY (message_id) REFERENCES qmq_outbox (message_id))"
        ],
        "foreign key refers of audit_log to qmq_outbox",
    ),
    (
        "postgresql",
        [
            FUNCTION,
            'CREATE TRIGGER "the Veto" BEFORE DELETE ON qmq_outbox FOR EACH ROW '
            "EXECUTE FUNCTION veto()",
        ],
        'trigger "the Veto" on qmq_outbox',
    ),
    (
        "postgresql",
        ["CREATE RULE veto AS ON DELETE TO qmq_inbox DO INSTEAD NOTHING"],
        "rule veto on qmq_inbox",
    ),
    (
        "postgresql",
        ["CREATE TABLE audit_log (message_id BYTEA REFERENCES qmq_outbox (message_id))"],
        "foreign key audit_log_message_id_fkey of audit_log to qmq_outbox",
    ),
]


def plant(engine: sa.Engine, statements: list[str]) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.mark.parametrize(("kind", "statements", "read"), PLANTED, ids=lambda value: str(value)[:30])
def test_X1_what_may_veto_our_statements_is_found_and_gone_after_its_fix(
    make_database: MakeDatabase, kind: str, statements: list[str], read: str
) -> None:
    engine = shop_of(make_database(kind))
    plant(engine, statements)
    assert mend(engine, "table.trigger").read == read
    assert ids(examine(engine)) == []


def test_X1_a_foreign_key_that_lets_rows_go_is_no_finding(a_server_database: Database) -> None:
    engine = shop_of(a_server_database)
    type_ = "BINARY(16)" if a_server_database.kind == "mysql" else "BYTEA"
    table = f"CREATE TABLE audit_log (message_id {type_}, FOREIGN KEY (message_id) REFERENCES "
    plant(engine, [f"{table} qmq_outbox (message_id) ON DELETE CASCADE)"])
    assert ids(examine(engine)) == []


@pytest.mark.parametrize("state", ["DISABLE", "ENABLE REPLICA"])
def test_X1_what_does_not_run_here_is_no_finding(make_database: MakeDatabase, state: str) -> None:
    engine = shop_of(make_database("postgresql"))
    plant(
        engine,
        [
            FUNCTION,
            "CREATE TRIGGER veto BEFORE DELETE ON qmq_outbox FOR EACH ROW EXECUTE FUNCTION veto()",
            f"ALTER TABLE qmq_outbox {state} TRIGGER veto",
            "CREATE RULE veto AS ON DELETE TO qmq_inbox DO INSTEAD NOTHING",
            f"ALTER TABLE qmq_inbox {state} RULE veto",
        ],
    )
    assert ids(examine(engine)) == []


def test_X1_a_foreign_key_that_keeps_rows_is_found_on_sqlite_too(
    make_database: MakeDatabase,
) -> None:
    """Where nothing can drop it: its table has to be made anew."""
    engine = shop_of(make_database("sqlite"))
    key = 'CREATE TABLE "audit log" (message_id BLOB REFERENCES QMQ_outbox (message_id)'
    plant(engine, [f"{key} ON DELETE CASCADE)"])
    assert ids(examine(engine)) == []
    plant(engine, ['DROP TABLE "audit log"', f"{key})"])
    finding = finding_of(engine, "table.trigger")
    assert finding is not None
    assert finding.read == "foreign key of audit log to qmq_outbox"
    assert finding.fix.startswith("recreate audit log without it")


def test_X1_a_user_of_mysql_who_sees_no_trigger_is_told_so(databases: Databases) -> None:
    with a_server(databases, "mysql") as server:
        shop = a_shop(server, "reader")
        plant(shop, list(PLANTED[1][1]))
        run(
            shop,
            "CREATE USER 'reader'@'%'; GRANT SELECT ON reader.* TO 'reader'@'%'; "
            "GRANT PROCESS ON *.* TO 'reader'@'%'",
        )
        modest = sa.create_engine(shop.url.set(username="reader"), poolclass=NullPool)
        may_not_write = {"rights.role", "rights.write"}
        (finding,) = [one for one in examine(modest) if one.id not in may_not_write]
        assert (finding.id, finding.fix) == (
            "rights.missing",
            "GRANT TRIGGER ON qmq_outbox TO 'reader'@'%'",
        )
        run(shop, "GRANT TRIGGER ON reader.* TO 'reader'@'%'")
        assert set(ids(examine(modest))) == may_not_write | {"table.trigger"}


POLICIES = [
    [],
    ["CREATE POLICY mine ON qmq_outbox FOR SELECT USING (true)"],
    ["CREATE POLICY mine ON qmq_outbox USING (subject <> 'secret')"],
    [
        "CREATE POLICY mine ON qmq_outbox USING (true)",
        "CREATE POLICY less ON qmq_outbox AS RESTRICTIVE FOR DELETE USING (subject <> 'secret')",
    ],
    [
        "CREATE ROLE somebody",
        "CREATE POLICY theirs ON qmq_outbox TO somebody USING (true)",
    ],
]


@pytest.mark.parametrize(
    "policies", POLICIES, ids=["none", "select", "some", "restrictive", "other"]
)
def test_X1_row_security_that_hides_rows_is_found_and_gone_after_its_fix(
    databases: Databases, policies: list[str]
) -> None:
    with a_server(databases, "postgresql") as server:
        shop = a_shop(server)
        run(shop, "CREATE ROLE app LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO app")
        run(
            shop,
            "GRANT pg_read_all_stats TO app; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO app",
        )
        app = sa.create_engine(shop.url.set(username="app"), poolclass=NullPool)
        plant(shop, [*policies, "ALTER TABLE qmq_outbox ENABLE ROW LEVEL SECURITY"])
        assert ids(examine(shop)) == [], "it does not count for the owner"
        finding = mend(app, "table.row_security", by=shop)
        assert finding.read.startswith("qmq_outbox shows app only rows that its policies allow: ")
        assert ids(examine(app)) == []
        plant(
            shop,
            [
                "ALTER TABLE qmq_outbox ENABLE ROW LEVEL SECURITY",
                "CREATE POLICY everything ON qmq_outbox TO app USING (true)",
            ],
        )
        is_enough = "RESTRICTIVE" not in str(policies)
        assert ids(examine(app)) == ([] if is_enough else ["table.row_security"])


def test_X1_rows_that_stay_though_the_broker_has_them_are_found_with_the_reason(
    a_database: Database,
) -> None:
    engine = shop_of(a_database)
    put_row(engine, state=2, due_s=60, error=None)  # kept for an audit
    assert ids(examine(engine)) == []
    for _ in range(3):
        put_row(engine, state=2, due_s=60, error=f"{UNDELETED}: not this one")
    finding = finding_of(engine, "rows.undeleted")
    assert finding is not None
    assert finding.read == "3 rows: not this one"
    assert "qmq outbox list --state sent" in finding.fix
    run(engine, "DELETE FROM qmq_outbox WHERE last_error IS NOT NULL")
    assert ids(examine(engine)) == []


def test_X1_an_examination_sees_all_where_the_server_cuts_results_short(
    databases: Databases,
) -> None:
    with a_server(databases, "mysql", "--default-time-zone=+00:00") as server:
        shop = a_shop(server)
        run(shop, "SET GLOBAL sql_select_limit = 1; SET GLOBAL max_join_size = 1")
        assert ids(examine(shop)) == []
        assert command(shop, "qmq db check").endswith(": as it should be\n")
