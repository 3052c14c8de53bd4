"""The durable table between the application and the broker."""

from reliablepub.outbox.inspection import OutboxStatus
from reliablepub.outbox.outbox import Outbox

__all__ = ["Outbox", "OutboxStatus"]
