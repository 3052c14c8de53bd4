"""Faults that act at a publish on its channel, its connection or the broker; `AnyOf` draws one.

Knows: the fields of each fault. Must never know: how the broker carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingFault(PublishFault):
    """Ends a channel, a connection or the broker at a publish.

    Attributes:
        accepted: Whether the queues accept the message first; its confirm is lost either way.
    """

    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseChannel(EndingFault):
    """channel.close, naming basic.publish (60, 40); publishes in flight get no confirm."""

    kind = "close_channel"
    code: int = 406
    text: str = "closed by a fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseConnection(EndingFault):
    """connection.close; with a code that methods raise (such as 540) it names basic.publish."""

    kind = "close_connection"
    code: int = 320
    text: str = "closed by a fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConnection(EndingFault):
    """The TCP connection ends without connection.close.

    Attributes:
        reset: End with RST; otherwise with FIN.
        after_bytes: With `accepted`: end the connection after this many more bytes were sent, so
            that it ends within the confirm or after it.
    """

    kind = "drop_connection"
    reset: bool = True
    after_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse `after_bytes` without `accepted`: there would be no confirm to cut."""
        PublishFault.__post_init__(self)
        if self.after_bytes < 0 or (self.after_bytes and not self.accepted):
            raise ValueError("after_bytes is 0 or more, and needs accepted=True")


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOpen(EndingFault):
    """A half-open connection: it stays open, and the broker answers nothing on it.

    Further input from the client is discarded; other connections are not affected.
    """

    kind = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(EndingFault):
    """The broker crashes, as on kill -9: connections are reset, and the port refuses new ones.

    Transient messages are lost, and persistent ones whose batch is not on disk; with `accepted`,
    the message of this publish is written first. The broker returns on the same port.

    Attributes:
        down_for_s: Seconds for which the port refuses; None: until `FakeBroker.start()`.
        lose_unsynced: False loses transient messages only.
    """

    kind = "crash"
    down_for_s: float | None = None
    lose_unsynced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteQueue(PublishFault):
    """A queue is deleted at the publish; publishes waiting for it are acked, as by RabbitMQ.

    Attributes:
        queue: Name of the queue; None: every queue that accepted the message.
    """

    kind = "delete_queue"
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteExchange(PublishFault):
    """The exchange is deleted before the publish is routed: 404 for this and later publishes."""

    kind = "delete_exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(PublishFault):
    """A resource alarm begins at the publish, which is withheld (connection.blocked).

    With `keep` or a `share`, and a short `for_s`, the alarm flaps.

    Attributes:
        for_s: Duration of the alarm in seconds; None: until `FakeBroker.unblock()`.
    """

    kind = "block"
    reason: str = "low on memory"
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(PublishFault):
    """The broker stops reading and answering at the publish, including heartbeats, as on SIGSTOP.

    Attributes:
        for_s: Duration of the freeze in seconds; None: until `FakeBroker.thaw()`.
    """

    kind = "freeze"
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf(PublishFault):
    """Acts as one of several faults, drawn at random each time from the broker's seed.

    The fields `nth`, `share`, `times`, `keep` and `routing_key` of this rule say when it acts;
    those of the inner faults are ignored.

    Attributes:
        faults: Faults of publishes.
    """

    kind = "any_of"
    faults: tuple[PublishFault, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list of faults, and an `AnyOf` within an `AnyOf`."""
        PublishFault.__post_init__(self)
        drawable = (
            isinstance(one, PublishFault) and not isinstance(one, AnyOf) for one in self.faults
        )
        if not self.faults or not all(drawable):
            raise ValueError("faults must be one or more faults of publishes")
