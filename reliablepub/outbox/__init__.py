"""The durable table between the application and the broker."""

from reliablepub.outbox.audit import Audit
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.inspection import HeldKey, OutboxStatus
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rekeying import Rekeyed
from reliablepub.outbox.salvage import BrokenRow, Salvaged

__all__ = [
    "Audit",
    "BrokenRow",
    "HeldKey",
    "Outbox",
    "OutboxKeys",
    "OutboxStatus",
    "Rekeyed",
    "Salvaged",
]
