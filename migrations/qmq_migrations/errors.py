"""Errors of migrations, defined here because this package imports no other package of the product.

::

    MigrationError               the database is unchanged, or in the state after the last complete step
    ├── UnknownRevisionError     a newer version of the product migrated it; upgrade the product
    ├── NoRevisionError          the named revision does not exist
    ├── OtherHistoryError        another Alembic history probably created QMQ's tables
    ├── UnrecordedTablesError    QMQ's tables exist without a revision to go back from
    ├── TablesGoneError          tables of the recorded revision are missing
    ├── SchemaMissingError       the schema for the tables does not exist
    ├── MigrationBusyError       another process is migrating it; run again later
    └── NoLockError              this kind of database has no lock against two migrations at once
"""

from __future__ import annotations


class MigrationError(Exception):
    """The database is unchanged, or in the state after the last complete step; remove the cause and run again."""


class UnknownRevisionError(MigrationError):
    """The database was migrated by a newer version of this product. Upgrade the product."""


class NoRevisionError(MigrationError):
    """A revision was named that does not exist."""


class OtherHistoryError(MigrationError):
    """QMQ's tables exist without a QMQ revision, next to another Alembic history.

    That history probably created and maintains them. Continue with it, or request the adoption explicitly.
    """


class UnrecordedTablesError(MigrationError):
    """QMQ's tables exist without a revision, so there is none to go back from."""


class TablesGoneError(MigrationError):
    """A revision is recorded, but tables of it are missing."""


class SchemaMissingError(MigrationError):
    """The schema for the tables does not exist; its owner must create it."""


class MigrationBusyError(MigrationError):
    """Another process holds the database or is migrating it. Run again later."""


class NoLockError(MigrationError):
    """For this kind of database there is no lock against two migrations at once."""
