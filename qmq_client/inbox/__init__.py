"""Effects once: the inbox next to the business data."""

from qmq_client.inbox.inbox import Inbox, InboxWork

__all__ = ["Inbox", "InboxWork"]
