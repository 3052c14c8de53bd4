"""The RabbitMQ publisher that keeps its word.

When ``publish()`` returns, the message is on disk. From then on it is published until the broker
has taken responsibility for it, or it is parked with a reason a person can read and undo.
"""

from reliablepub.async_publisher import AsyncPublisher
from reliablepub.async_receipt import AsyncBatchReceipt, AsyncReceipt
from reliablepub.errors import (
    ConfigurationError,
    Expired,
    InvalidMessage,
    Nacked,
    NotAnOutbox,
    OutboxDiskFull,
    OutboxError,
    OutboxFull,
    OutboxInUse,
    OutboxLocked,
    OutboxUnsure,
    PublisherClosed,
    PublisherForked,
    PublishError,
    Refused,
    ReliablePubError,
    StillOpen,
    Unroutable,
    WrongEventLoop,
)
from reliablepub.message import Message
from reliablepub.outbox import Outbox, OutboxStatus
from reliablepub.outcome import Confirmed, Outcome, OutcomeKind, Persistence
from reliablepub.policy import Retries, RetryPolicy
from reliablepub.publisher import Publisher
from reliablepub.receipt import BatchReceipt, Receipt
from reliablepub.relay.status import Link, Status

__all__ = [
    "AsyncBatchReceipt",
    "AsyncPublisher",
    "AsyncReceipt",
    "BatchReceipt",
    "ConfigurationError",
    "Confirmed",
    "Expired",
    "InvalidMessage",
    "Link",
    "Message",
    "Nacked",
    "NotAnOutbox",
    "Outbox",
    "OutboxDiskFull",
    "OutboxError",
    "OutboxFull",
    "OutboxInUse",
    "OutboxLocked",
    "OutboxStatus",
    "OutboxUnsure",
    "Outcome",
    "OutcomeKind",
    "Persistence",
    "PublishError",
    "Publisher",
    "PublisherClosed",
    "PublisherForked",
    "Receipt",
    "Refused",
    "ReliablePubError",
    "Retries",
    "RetryPolicy",
    "Status",
    "StillOpen",
    "Unroutable",
    "WrongEventLoop",
]
