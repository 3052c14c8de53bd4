"""Faults that hit a channel, a connection or the broker at a publish.

This module must never know how the broker carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault, check_code


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingFault(PublishFault):
    """Ends a channel, a connection or the broker at a publish.

    Attributes:
        accepted: Whether the queues take the message first; its confirm is lost either way.
    """

    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseChannel(EndingFault):
    """channel.close, naming basic.publish (60, 40); publishes in flight get no confirm."""

    kind = "close_channel"
    code: int = 406
    text: str = "closed by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        PublishFault.__post_init__(self)
        check_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseConnection(EndingFault):
    """connection.close; with a code that methods raise (such as 540) it names basic.publish."""

    kind = "close_connection"
    code: int = 320
    text: str = "closed by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        PublishFault.__post_init__(self)
        check_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConnection(EndingFault):
    """The TCP connection ends without connection.close.

    Attributes:
        reset: End with RST; otherwise with FIN.
        after_bytes: With `accepted`: end the connection only after this many more bytes were sent,
            so that it ends within the confirm or after it.
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
    """A half-open connection: the connection stays open, and the broker answers nothing on it.

    Further input of the client is discarded; other connections go on.
    """

    kind = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(EndingFault):
    """The broker dies as by kill -9: connections are reset and the port refuses.

    Transient messages are lost, and persistent ones whose batch is not on disk; with `accepted`
    the message of this publish is written first. The broker comes back on the same port.

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
    """The broker stops reading and answering at the publish, including heartbeats, as by SIGSTOP.

    Attributes:
        for_s: Duration of the freeze in seconds; None: until `FakeBroker.thaw()`.
    """

    kind = "freeze"
    for_s: float | None = None
