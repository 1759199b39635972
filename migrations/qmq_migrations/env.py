"""The Alembic environment of `qmq db migrate`; not used with an application's own environment.

`upgrade.py` passes in the configuration: a connection, already inside the
transaction that holds the lock, or a dialect's name if SQL is only printed.
"""

from __future__ import annotations

from alembic import context

config = context.config
schema = config.get_main_option("qmq_schema") or None
version_table = config.get_main_option("qmq_prefix", "qmq_") + "version"

if context.is_offline_mode():
    context.configure(
        dialect_name=config.attributes["dialect_name"],
        version_table=version_table,
        version_table_schema=schema,
        literal_binds=True,
    )
else:
    context.configure(
        connection=config.attributes["connection"],
        version_table=version_table,
        version_table_schema=schema,
    )

with context.begin_transaction():
    context.run_migrations()
