"""A database user with no more rights than its process needs."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from qmq_client.message import Message
from qmq_client.options import ProducerOptions
from qmq_client.outbox.table import create_tables
from qmq_client.producer import Producer
from qmq_client.testing import MemoryBroker, MemoryTransport
from qmq_migrations.upgrade import migrate
from tests.client.world import SUBJECT
from tests.services.databases import Database

#: With the name of the user in them.
GRANTS = {
    "mysql": [
        "CREATE USER '{user}'@'127.0.0.1'",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON qmq_outbox TO '{user}'@'127.0.0.1'",
        "GRANT SELECT, INSERT, UPDATE ON qmq_order_lock TO '{user}'@'127.0.0.1'",
    ],
    "postgresql": [
        "CREATE ROLE {user} LOGIN",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON qmq_outbox TO {user}",
        "GRANT SELECT, INSERT, UPDATE ON qmq_order_lock TO {user}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {user}",
    ],
}
REVOKES = {
    "mysql": ["DROP USER '{user}'@'127.0.0.1'"],
    "postgresql": ["DROP OWNED BY {user}", "DROP ROLE {user}"],
}


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_user_with_rights_on_the_outbox_alone_sends_and_publishes(
    is_ordered: bool, a_server_database: Database
) -> None:
    admin = a_server_database.engine()
    user = f"sends_{str(admin.url.database)[-24:]}"  # users belong to the whole server
    migrate(admin)
    create_tables(admin)
    with admin.begin() as connection:
        for statement in GRANTS[a_server_database.kind]:
            connection.exec_driver_sql(statement.format(user=user))
    try:
        engine = sa.create_engine(admin.url.set(username=user, password=None))
        broker = MemoryBroker()
        options = ProducerOptions(background=False, order_by_key=is_ordered)
        with Producer(engine, MemoryTransport(broker), options=options) as producer:
            with Session(engine) as session:
                producer.send(Message(SUBJECT, "hello", key="k"), session=session)
                session.commit()
            assert producer.flush()
        assert [message.body for message in broker.messages(SUBJECT)] == ["hello"]
        engine.dispose()
    finally:
        with admin.begin() as connection:
            for statement in REVOKES[a_server_database.kind]:
                connection.exec_driver_sql(statement.format(user=user))
