"""`python -m qmq_broker`: `serve` and `token` of `qmq broker`, without the client."""

from __future__ import annotations

from qmq_broker.face.commands.broker import broker

if __name__ == "__main__":
    broker(prog_name="python -m qmq_broker")
