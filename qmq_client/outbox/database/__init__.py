"""The differences between SQLite, MySQL, MariaDB and PostgreSQL, behind one port."""
