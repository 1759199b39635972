"""An application on Flask-SQLAlchemy, to be run by gunicorn under load; its producer is made with it.

`POST /WAY/N?is_refused=…` places order N: its row, a message with N as its body, and a rollback when it
is refused. The way is `named`, with `session=`, or `told`: the producer was told whom to ask; `read` reads first, and so does
`read-alone`, which sends nothing.
"""

from __future__ import annotations

import atexit
import os
import time

import click
import flask
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy

from qmq_client import Message, Producer, create_tables
from tests.client.world import SUBJECT, Base, Order, prepare

#: Between the read and the write of a request.
THINK_S = 0.005


def create_app() -> flask.Flask:
    """The application with its own connections, whether or not the database answers."""
    app = flask.Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE"]
    db = SQLAlchemy(app)
    with app.app_context():
        engine = db.engine
    prepare(engine)
    producer = Producer(engine, os.environ["SHOP_BROKER"], session=db.session)
    atexit.register(producer.close)

    @app.post("/<way>/<n>")
    def place(way: str, n: str) -> tuple[str, int]:
        if way in ("read", "read-alone"):
            db.session.scalars(sa.select(Order).where(Order.label == n)).all()
            time.sleep(THINK_S)
        db.session.execute(sa.insert(Order).values(label=n))
        if way != "read-alone":
            producer.send(Message(SUBJECT, n), session=db.session if way == "named" else None)
        if flask.request.args["is_refused"] == "true":
            db.session.rollback()
            return "", 409
        db.session.commit()
        return "", 200

    @app.post("/flush")
    def flush() -> flask.Response:
        return flask.jsonify(bool(producer.flush(60)))

    @app.get("/alive")
    def alive() -> flask.Response:
        return flask.jsonify("yes")

    @app.cli.command("migrate")
    def migrate() -> None:
        """What a migration does: makes the tables, in an application whose producer is there already."""
        Base.metadata.create_all(engine)
        create_tables(engine)
        click.echo("migrated")

    return app
