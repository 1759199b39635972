"""The state machine of a consumer group: pure, without files, threads or a clock.

Actions (`actions.py`) are the only way to change a group (`state.py`, `apply.py`). `picking.py` decides which
actions follow from a pull, `settling.py` those from settlements and ends of leases; both only read. The broker
writes actions to its log before it applies them, `MemoryBroker` applies them at once, and the pipeline reads them
from the log for the outcome of each message.
"""
