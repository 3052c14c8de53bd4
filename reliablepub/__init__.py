"""A reliable publisher for RabbitMQ: publisher confirms, retries and a durable outbox.

When ``publish()`` returns, the message is on disk. From then on it is published until the broker
has taken responsibility for it, or it is parked with the broker's reason; an operator can retry it.

Most names are imported on first access: a program that only enqueues loads neither the relay nor
pika, and one without asyncio no event loop.
"""

from typing import TYPE_CHECKING

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
    OutboxUnreachable,
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
from reliablepub.message import Message, MessageFields
from reliablepub.outcome import Concern, Confirmed, Outcome, OutcomeKind, Persistence

if TYPE_CHECKING:
    from reliablepub.certificates import CertificateFiles, ContextProvider
    from reliablepub.credentials import Credentials, CredentialsProvider, PasswordFile
    from reliablepub.front.async_publisher import AsyncPublisher
    from reliablepub.front.async_receipt import AsyncBatchReceipt, AsyncReceipt
    from reliablepub.front.options import PublisherOptions
    from reliablepub.front.provisioning import provision
    from reliablepub.front.publisher import Publisher
    from reliablepub.front.receipt import BatchReceipt, Receipt
    from reliablepub.outbox.admin.inspection import HeldKey, OutboxStatus, ParkedMessage
    from reliablepub.outbox.admin.integrity import Audit
    from reliablepub.outbox.admin.rekeying import Rekeyed
    from reliablepub.outbox.admin.scheduling import ScheduleChange
    from reliablepub.outbox.database import LostCommits
    from reliablepub.outbox.encryption import OutboxKeys
    from reliablepub.outbox.entry import Counters
    from reliablepub.outbox.outbox import Outbox
    from reliablepub.outbox.sqlite.salvage import Salvaged
    from reliablepub.policy import Breaker, GiveUp, Refusal, Retries, RetryIn, RetryPolicy
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
    "CertificateFiles",
    "Concern",
    "ConfigurationError",
    "Confirmed",
    "ContextProvider",
    "Counters",
    "Credentials",
    "CredentialsProvider",
    "Damaged",
    "Exchange",
    "Expired",
    "GiveUp",
    "HeldKey",
    "InvalidMessage",
    "Link",
    "LostCommits",
    "Message",
    "MessageFields",
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
    "OutboxUnreachable",
    "OutboxUnsure",
    "Outcome",
    "OutcomeKind",
    "ParkedMessage",
    "PasswordFile",
    "Paused",
    "Persistence",
    "PublishError",
    "Publisher",
    "PublisherClosed",
    "PublisherFailed",
    "PublisherForked",
    "PublisherOptions",
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
    "ScheduleChange",
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


_LAZY = {
    "CertificateFiles": "certificates",
    "ContextProvider": "certificates",
    "Credentials": "credentials",
    "CredentialsProvider": "credentials",
    "PasswordFile": "credentials",
    "AsyncPublisher": "front.async_publisher",
    "AsyncBatchReceipt": "front.async_receipt",
    "AsyncReceipt": "front.async_receipt",
    "PublisherOptions": "front.options",
    "provision": "front.provisioning",
    "Publisher": "front.publisher",
    "BatchReceipt": "front.receipt",
    "Receipt": "front.receipt",
    "HeldKey": "outbox.admin.inspection",
    "OutboxStatus": "outbox.admin.inspection",
    "ParkedMessage": "outbox.admin.inspection",
    "Audit": "outbox.admin.integrity",
    "Rekeyed": "outbox.admin.rekeying",
    "ScheduleChange": "outbox.admin.scheduling",
    "Salvaged": "outbox.sqlite.salvage",
    "LostCommits": "outbox.database",
    "OutboxKeys": "outbox.encryption",
    "Counters": "outbox.entry",
    "Outbox": "outbox.outbox",
    "Breaker": "policy",
    "GiveUp": "policy",
    "Refusal": "policy",
    "Retries": "policy",
    "RetryIn": "policy",
    "RetryPolicy": "policy",
    "Link": "relay.status",
    "Paused": "relay.status",
    "Status": "relay.status",
    "Binding": "topology",
    "Exchange": "topology",
    "Queue": "topology",
    "Topology": "topology",
}
"""Names that are imported on first access, and their modules."""


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # type checkers read the imports above

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        return value
