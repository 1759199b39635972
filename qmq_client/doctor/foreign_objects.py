"""Checks for foreign objects on QMQ's tables: triggers, rules, foreign keys, row security.

Each of these may block one of QMQ's statements, with an error or silently, or alter the stored
values. Most do neither. No catalog says which ones do, so each is shown and a person decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from qmq_client.doctor.finding import Findings, found
from qmq_client.doctor.rights import missing
from qmq_client.outbox.checking.rights import user
from qmq_client.outbox.database.table_names import table_text
from qmq_client.outbox.table import Tables

_SHOWN_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class _Stranger:
    """One such object."""

    #: Kind, name and table, for a person.
    read: str
    #: The statement that removes it.
    fix: str


def foreign_objects(connection: sa.Connection, tables: Tables) -> Findings:
    """Objects that may interfere with QMQ's statements. Requires: the tables exist."""
    kind = connection.dialect.name
    here = [each for table in tables.all for each in _FINDERS[kind](connection, table)]
    if here:
        shown = here[:_SHOWN_MAX]
        more = f"; and {len(here) - len(shown)} more" if len(here) > len(shown) else ""
        read = "; ".join(each.read for each in shown) + more
        yield found("table.trigger", read, "; ".join(each.fix for each in shown))
    if kind == "postgresql":
        for table in tables.all:
            yield from _row_security(connection, table)
    elif kind != "sqlite" and not here:
        yield from _unseen(connection, tables)


def _of_postgresql(connection: sa.Connection, table: sa.Table) -> Iterator[_Stranger]:
    name = table_text(connection, table)
    for trigger in connection.scalars(_POSTGRESQL_TRIGGERS, {"name": name}):
        yield _Stranger(f"trigger {trigger} on {name}", f"DROP TRIGGER {trigger} ON {name}")
    for rule in connection.scalars(_POSTGRESQL_RULES, {"name": name}):
        yield _Stranger(f"rule {rule} on {name}", f"DROP RULE {rule} ON {name}")
    for key, owner in connection.execute(_POSTGRESQL_KEYS, {"name": name}):
        yield _Stranger(
            f"foreign key {key} of {owner} to {name}", f"ALTER TABLE {owner} DROP CONSTRAINT {key}"
        )


def _of_mysql(connection: sa.Connection, table: sa.Table) -> Iterator[_Stranger]:
    name = table_text(connection, table)
    quote = connection.dialect.identifier_preparer.quote_identifier
    values = {"schema": table.schema, "name": table.name}
    for schema, trigger in connection.execute(_MYSQL_TRIGGERS, values):
        quoted = f"{quote(schema)}.{quote(trigger)}"
        yield _Stranger(f"trigger {trigger} on {name}", f"DROP TRIGGER {quoted}")
    for schema, owner, key in connection.execute(_MYSQL_KEYS, values):
        quoted = f"{quote(schema)}.{quote(owner)}"
        yield _Stranger(
            f"foreign key {key} of {owner} to {name}",
            f"ALTER TABLE {quoted} DROP FOREIGN KEY {quote(key)}",
        )


def _of_sqlite(connection: sa.Connection, table: sa.Table) -> Iterator[_Stranger]:
    quote = connection.dialect.identifier_preparer.quote_identifier
    schema = table.schema or "main"
    triggers = sa.text(
        f"SELECT name FROM {quote(schema)}.sqlite_master "
        "WHERE type = 'trigger' AND lower(tbl_name) = lower(:name)"
    )
    for trigger in connection.scalars(triggers, {"name": table.name}):
        fix = f"DROP TRIGGER {quote(schema)}.{quote(trigger)}"
        yield _Stranger(f"trigger {trigger} on {table.name}", fix)
    owners = sa.text(
        f"SELECT DISTINCT owner.name FROM {quote(schema)}.sqlite_master AS owner, "
        "pragma_foreign_key_list(owner.name, :schema) AS key WHERE owner.type = 'table' "
        'AND lower(key."table") = lower(:name) '
        "AND key.on_delete IN ('RESTRICT', 'NO ACTION') "
        "ORDER BY owner.name"
    )
    for owner in connection.scalars(owners, {"schema": schema, "name": table.name}):
        yield _Stranger(
            f"foreign key of {owner} to {table.name}",
            f"recreate {owner} without it: SQLite cannot drop a foreign key",
        )


_FINDERS: Final[dict[str, Callable[[sa.Connection, sa.Table], Iterator[_Stranger]]]] = {
    "mysql": _of_mysql,
    "mariadb": _of_mysql,
    "postgresql": _of_postgresql,
    "sqlite": _of_sqlite,
}
#: Without triggers that implement foreign keys, are disabled, or apply only to replicas.
_POSTGRESQL_TRIGGERS: Final = sa.text(
    "SELECT quote_ident(tgname) FROM pg_trigger WHERE tgrelid = to_regclass(:name) "
    "AND NOT tgisinternal AND tgenabled IN ('O', 'A') ORDER BY tgname"
)
_POSTGRESQL_RULES: Final = sa.text(
    "SELECT quote_ident(rulename) FROM pg_rewrite WHERE ev_class = to_regclass(:name) "
    "AND ev_enabled IN ('O', 'A') ORDER BY rulename"
)
#: Foreign keys that forbid deleting the referenced row.
_POSTGRESQL_KEYS: Final = sa.text(
    "SELECT quote_ident(conname), CAST(CAST(conrelid AS regclass) AS text) FROM pg_constraint "
    "WHERE contype = 'f' AND confrelid = to_regclass(:name) AND confdeltype IN ('a', 'r') "
    "ORDER BY conname"
)
_MYSQL_TRIGGERS: Final = sa.text(
    "SELECT trigger_schema, trigger_name FROM information_schema.triggers "
    "WHERE event_object_schema = COALESCE(:schema, DATABASE()) AND event_object_table = :name "
    "ORDER BY trigger_name"
)
_MYSQL_KEYS: Final = sa.text(
    "SELECT constraint_schema, table_name, constraint_name "
    "FROM information_schema.referential_constraints "
    "WHERE unique_constraint_schema = COALESCE(:schema, DATABASE()) "
    "AND referenced_table_name = :name AND delete_rule IN ('RESTRICT', 'NO ACTION') "
    "ORDER BY constraint_name"
)
_SEES_TRIGGERS: Final = sa.text(
    "SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'TRIGGER' UNION ALL "
    "SELECT 1 FROM information_schema.schema_privileges WHERE privilege_type = 'TRIGGER' "
    "AND COALESCE(:schema, DATABASE()) LIKE table_schema UNION ALL "
    "SELECT 1 FROM information_schema.table_privileges WHERE privilege_type = 'TRIGGER' "
    "AND table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name LIMIT 1"
)


def _unseen(connection: sa.Connection, tables: Tables) -> Findings:
    """The finding for triggers that MySQL shows only to users who may create them."""
    outbox = tables.outbox
    values = {"schema": outbox.schema, "name": outbox.name}
    if connection.execute(_SEES_TRIGGERS, values).first() is None and not _has_roles(connection):
        name = table_text(connection, outbox)
        yield missing(connection, f"TRIGGER ON {name}", f"the triggers of {name}")


def _has_roles(connection: sa.Connection) -> bool:
    """Whether this user's rights may come from a role, and so are missing in the tables of rights."""
    grants = connection.exec_driver_sql("SHOW GRANTS").scalars()
    return any(" ON " not in grant for grant in grants)


def _row_security(connection: sa.Connection, table: sa.Table) -> Findings:
    """The finding for row security that applies to this user and does not allow all rows."""
    name = table_text(connection, table)
    if not connection.scalar(_IS_SECURED, {"name": name}):
        return
    policies = connection.execute(_POLICIES, {"name": name}).all()
    if _are_open(policies):
        return
    shown = ", ".join(f"{policy.polname} ({_COMMANDS[policy.cmd]})" for policy in policies)
    read = f"{name} shows {user(connection)} only rows that its policies allow: {shown or 'there are none'}"
    yield found("table.row_security", read, f"ALTER TABLE {name} DISABLE ROW LEVEL SECURITY")


def _are_open(policies: Any) -> bool:
    """Whether one policy allows all rows and none restricts them."""
    return all(policy.polpermissive for policy in policies) and any(
        policy.cmd == "*" and policy.is_open for policy in policies
    )


_COMMANDS: Final = {"*": "all", "r": "SELECT", "a": "INSERT", "w": "UPDATE", "d": "DELETE"}
_IS_SECURED: Final = sa.text("SELECT row_security_active(to_regclass(:name))")
#: Policies for this user, by name or by role.
_POLICIES: Final = sa.text(
    "SELECT polname, polpermissive, CAST(polcmd AS text) AS cmd, "
    "pg_get_expr(polqual, polrelid) = 'true' "
    "AND coalesce(pg_get_expr(polwithcheck, polrelid), 'true') = 'true' AS is_open "
    "FROM pg_policy WHERE polrelid = to_regclass(:name) AND EXISTS (SELECT 1 FROM unnest(polroles) "
    "AS of_role WHERE of_role = 0 OR pg_has_role(of_role, 'USAGE')) ORDER BY polname"
)
