"""Test doubles for applications: a producer that shows its messages, a broker in memory, and a clock.

`drain` runs handlers in one call until no messages are left.
"""

from qmq_client.testing.draining import DrainReport, drain
from qmq_client.testing.fake_clock import FakeClock
from qmq_client.testing.recording_producer import RecordingProducer, memory_engine
from qmq_client.transport.memory import MemoryBroker, MemoryFaults, MemoryTransport

__all__ = [
    "DrainReport",
    "FakeClock",
    "MemoryBroker",
    "MemoryFaults",
    "MemoryTransport",
    "RecordingProducer",
    "drain",
    "memory_engine",
]
