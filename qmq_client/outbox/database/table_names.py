"""The name of a table in statements: one for drivers, one for people and as a value.

To a driver that formats its statements a percent sign means more, so it is written twice.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa


def table_sql(connection: sa.Connection | sa.Engine, table: Any) -> str:
    """The quoted name in a statement for `exec_driver_sql`."""
    return connection.dialect.identifier_preparer.format_table(table)


def table_text(connection: sa.Connection | sa.Engine, table: Any) -> str:
    """The quoted name as a person writes it in a statement, or as a parameter of one."""
    return table_sql(connection, table).replace("%%", "%")
