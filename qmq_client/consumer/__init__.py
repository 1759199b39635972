"""Receiving messages: handlers, their outcomes, and the threads that run them."""

from qmq_client.consumer.delivery import Delivery
from qmq_client.consumer.handler import Handler, HandlerCall, Middleware, StaleDelivery, consumer
from qmq_client.consumer.options import ConsumerOptions
from qmq_client.consumer.pulling import pull
from qmq_client.consumer.runner import Consumers, StopReport

__all__ = [
    "ConsumerOptions",
    "Consumers",
    "Delivery",
    "Handler",
    "HandlerCall",
    "Middleware",
    "StaleDelivery",
    "StopReport",
    "consumer",
    "pull",
]
