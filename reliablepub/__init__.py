"""A reliable publisher for RabbitMQ: publisher confirms, retries and a durable outbox.

When ``publish()`` returns, the message is on disk. From then on it is published until the broker
has taken responsibility for it, or it is parked with the broker's reason; an operator can retry it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

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
    PublisherFailed,
    PublisherForked,
    PublishError,
    Refused,
    RelayHeldUp,
    ReliablePubError,
    StillOpen,
    TopologyError,
    Unroutable,
    Withdrawn,
    WrongEventLoop,
    WrongThread,
)
from reliablepub.front.async_publisher import AsyncPublisher
from reliablepub.front.async_receipt import AsyncBatchReceipt, AsyncReceipt
from reliablepub.front.provisioning import provision
from reliablepub.front.publisher import Publisher
from reliablepub.front.receipt import BatchReceipt, Receipt
from reliablepub.message import Message
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.outbox import Outbox
from reliablepub.outcome import Confirmed, Outcome, OutcomeKind, Persistence
from reliablepub.policy import Breaker, GiveUp, Refusal, Retries, RetryIn, RetryPolicy
from reliablepub.relay.status import Link, Paused, Status
from reliablepub.topology import Binding, Exchange, Queue, Topology

if TYPE_CHECKING:
    from reliablepub.outbox.admin.inspection import HeldKey, OutboxStatus
    from reliablepub.outbox.admin.integrity import Audit
    from reliablepub.outbox.admin.rekeying import Rekeyed
    from reliablepub.outbox.admin.salvage import Salvaged

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
    "PublisherFailed",
    "PublisherForked",
    "Queue",
    "Receipt",
    "Refusal",
    "Refused",
    "Rekeyed",
    "RelayHeldUp",
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
    "WrongThread",
    "provision",
]

_ADMIN: Final = {
    "Audit": "integrity",
    "HeldKey": "inspection",
    "OutboxStatus": "inspection",
    "Rekeyed": "rekeying",
    "Salvaged": "salvage",
}
"""Result types of the operators' tools and their modules; imported on first access, so that a
program that only publishes does not load them."""


def __getattr__(name: str) -> object:
    if name not in _ADMIN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"reliablepub.outbox.admin.{_ADMIN[name]}"), name)
