"""Effects once: the inbox beside the business data."""

from qmq_client.inbox.inbox import Inbox, InboxWork

__all__ = ["Inbox", "InboxWork"]
