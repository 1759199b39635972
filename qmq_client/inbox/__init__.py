"""The inbox next to the business data, for effects that happen once."""

from qmq_client.inbox.inbox import Inbox, InboxWork

__all__ = ["Inbox", "InboxWork"]
