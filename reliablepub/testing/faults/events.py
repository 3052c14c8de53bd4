"""Faults of events: what happens to a channel, a connection or the broker at a publish.

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
    """channel.close, naming basic.publish (60, 40); all that is in flight stays undecided."""

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
    """The TCP connection ends without a word.

    Attributes:
        reset: RST; otherwise FIN.
        after_bytes: With `accepted`: the connection goes on until so many more bytes were sent, so
            that it ends within the confirm, or behind it.
    """

    kind = "drop_connection"
    reset: bool = True
    after_bytes: int = 0

    def __post_init__(self) -> None:
        """What was not accepted has no confirm to end in."""
        PublishFault.__post_init__(self)
        if self.after_bytes < 0 or (self.after_bytes and not self.accepted):
            raise ValueError("after_bytes is 0 or more, and needs accepted=True")


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOpen(EndingFault):
    """The broker is gone and nobody says so: the connection stays open, and nothing answers.

    What the client still sends is swallowed; other connections go on.
    """

    kind = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(EndingFault):
    """The broker dies as by kill -9: connections are reset and the port refuses.

    What is not written (transient messages, and persistent ones whose batch is not on disk) is
    lost; with `accepted` the message at hand is written first. It comes back on the same port.

    Attributes:
        down_for_s: For how long the port refuses; None is until `FakeBroker.start()`.
        lose_unsynced: False loses transient messages only.
    """

    kind = "crash"
    down_for_s: float | None = None
    lose_unsynced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteQueue(PublishFault):
    """A queue is deleted under the publish; what is outstanding there is acked, as by RabbitMQ.

    Attributes:
        queue: Its name; None is every queue that took the message.
    """

    kind = "delete_queue"
    queue: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteExchange(PublishFault):
    """The exchange of the publish is deleted before it is looked up: 404, and for all behind it."""

    kind = "delete_exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(PublishFault):
    """A resource alarm begins at the publish, which is withheld (connection.blocked).

    With `keep` or a `share`, and a short `for_s`, the alarm flaps.

    Attributes:
        for_s: How long the alarm lasts; None is until `FakeBroker.unblock()`.
    """

    kind = "block"
    reason: str = "low on memory"
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(PublishFault):
    """The broker stops reading and answering at the publish, heartbeats too, as by SIGSTOP.

    Attributes:
        for_s: How long it is frozen; None is until `FakeBroker.thaw()`.
    """

    kind = "freeze"
    for_s: float | None = None
