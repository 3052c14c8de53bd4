"""The RabbitMQ publisher that keeps its word.

When ``publish()`` returns, the message is on disk. From then on it is published until the broker
has taken responsibility for it, or it is parked with a reason a person can read and undo.
"""

from reliablepub.async_publisher import AsyncPublisher
from reliablepub.async_receipt import AsyncBatchReceipt, AsyncReceipt
from reliablepub.errors import (
    ConfigurationError,
    Damaged,
    Expired,
    InvalidMessage,
    Nacked,
    NotAnOutbox,
    OutboxDiskFailed,
    OutboxDiskFull,
    OutboxError,
    OutboxForked,
    OutboxFull,
    OutboxInUse,
    OutboxLocked,
    OutboxMoved,
    OutboxSealed,
    OutboxUnsure,
    PublisherClosed,
    PublisherForked,
    PublishError,
    Refused,
    ReliablePubError,
    StillOpen,
    TopologyError,
    Unroutable,
    Withdrawn,
    WrongEventLoop,
)
from reliablepub.message import Message
from reliablepub.outbox import (
    Audit,
    HeldKey,
    Outbox,
    OutboxKeys,
    OutboxStatus,
    Rekeyed,
    Salvaged,
)
from reliablepub.outcome import Confirmed, Outcome, OutcomeKind, Persistence
from reliablepub.policy import Breaker, GiveUp, Refusal, Retries, RetryIn, RetryPolicy
from reliablepub.provisioning import provision
from reliablepub.publisher import Publisher
from reliablepub.receipt import BatchReceipt, Receipt
from reliablepub.relay.status import Link, Paused, Status
from reliablepub.topology import Binding, Exchange, Queue, Topology

__all__ = [
    "AsyncBatchReceipt",
    "AsyncPublisher",
    "AsyncReceipt",
    "Audit",
    "BatchReceipt",
    "Binding",
    "Breaker",
    "ConfigurationError",
    "Confirmed",
    "Damaged",
    "Exchange",
    "Expired",
    "GiveUp",
    "HeldKey",
    "InvalidMessage",
    "Link",
    "Message",
    "Nacked",
    "NotAnOutbox",
    "Outbox",
    "OutboxDiskFailed",
    "OutboxDiskFull",
    "OutboxError",
    "OutboxForked",
    "OutboxFull",
    "OutboxInUse",
    "OutboxKeys",
    "OutboxLocked",
    "OutboxMoved",
    "OutboxSealed",
    "OutboxStatus",
    "OutboxUnsure",
    "Outcome",
    "OutcomeKind",
    "Paused",
    "Persistence",
    "PublishError",
    "Publisher",
    "PublisherClosed",
    "PublisherForked",
    "Queue",
    "Receipt",
    "Refusal",
    "Refused",
    "Rekeyed",
    "ReliablePubError",
    "Retries",
    "RetryIn",
    "RetryPolicy",
    "Salvaged",
    "Status",
    "StillOpen",
    "Topology",
    "TopologyError",
    "Unroutable",
    "Withdrawn",
    "WrongEventLoop",
    "provision",
]
