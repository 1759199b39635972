"""Errors of migrations. This package imports no other of the product, nor its errors.

::

    MigrationError               the database is as it was, or as the last whole step made it
    ├── UnknownRevisionError     a newer version of the product migrated it; upgrade the product
    ├── NoRevisionError          the revision that was named does not exist
    ├── OtherHistoryError        another Alembic history most likely made our tables
    ├── UnrecordedTablesError    our tables are there without a revision to go back from
    ├── TablesGoneError          tables of the noted revision are not there
    ├── SchemaMissingError       the schema for the tables is not there
    ├── MigrationBusyError       another process migrates it now; run again later
    └── NoLockError              nothing keeps two migrations of such a database apart
"""

from __future__ import annotations


class MigrationError(Exception):
    """The database was left as it was, or as the last whole step made it; run again after mending."""


class UnknownRevisionError(MigrationError):
    """The database was migrated by a newer version of this product. Upgrade the product."""


class NoRevisionError(MigrationError):
    """A revision was named that does not exist."""


class OtherHistoryError(MigrationError):
    """Our tables are there without our revision, next to another Alembic history.

    That history most likely made them and continues with them. Stay with it, or say that they are to
    be adopted.
    """


class UnrecordedTablesError(MigrationError):
    """Our tables are there without our revision, so there is none to go back from."""


class TablesGoneError(MigrationError):
    """A revision is noted and tables that it made are not there."""


class SchemaMissingError(MigrationError):
    """The schema that the tables are to be in is not there; schemas are for their owner to create."""


class MigrationBusyError(MigrationError):
    """Another process holds the database or migrates it now. Run again later."""


class NoLockError(MigrationError):
    """For this kind of database there is no lock against two migrations at once."""
