"""What can go wrong, in words a person can act on.

Knows: the names of failures, and which of them may be tried again. Must never know: sockets, SQL,
clocks.

    ReliablePubError
    ├── InvalidMessage        the message could never be published; nothing was stored or sent
    ├── ConfigurationError    an option, an address or a policy is wrong
    ├── TopologyError         exchanges or queues are not what the publisher counts on
    ├── PublishError          the final outcome of one message that was not confirmed
    │   ├── Unroutable        no queue wanted it (basic.return)
    │   ├── Nacked            the broker refused responsibility (basic.nack)
    │   ├── Refused           the broker closed the channel because of it, or it cannot be written
    │   ├── Expired           its deadline passed before it was confirmed
    │   ├── Damaged           its row in the outbox is not what was stored; it is parked, unsent
    │   └── Withdrawn         a person parked or discarded it before it was confirmed
    ├── StillOpen             the wait ended first; the message is not lost, and not yet confirmed
    ├── PublisherClosed       this publisher takes no more messages
    │   └── PublisherFailed   because its relay has failed
    ├── PublisherForked       this process did not open the publisher
    ├── WrongEventLoop        this event loop did not open the publisher
    ├── WrongThread           a callback waits for the relay, on the relay's own thread
    ├── RelayHeldUp           a callback does not return, and the relay waits for it
    └── OutboxError           the outbox on disk
        ├── OutboxFull        its limit in messages or bytes is reached
        ├── OutboxDiskFull    the disk is full
        ├── OutboxDiskFailed  the disk cannot be read or written; nothing was stored
        ├── OutboxInUse       another process relays it
        ├── OutboxLocked      another process keeps it locked for too long
        ├── OutboxForked      it was open when this process was forked
        ├── OutboxMoved       its files were deleted, moved or replaced while they were open
        ├── OutboxSealed      a message is encrypted, and its key was not given
        ├── OutboxUnsure      the disk failed during a commit: it may or may not be stored
        └── NotAnOutbox       the file is something else, or of a newer version

Every error can be pickled (Spark sends them between processes); none holds a body or a password.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from reliablepub.printable import printable

DISCARDED: Final = "it was discarded, as the retry policy says"


class ReliablePubError(Exception):
    """The root of everything that reliablepub raises on purpose.

    Attributes:
        retryable: whether the same call may succeed later without a change by a person.
    """

    retryable: ClassVar[bool] = False

    def __str__(self) -> str:
        """The text, without characters that would act on a terminal or forge a line of a log."""
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, so that subclasses may have any constructor."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[ReliablePubError], args: tuple[object, ...], state: dict[str, object]
) -> ReliablePubError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidMessage(ReliablePubError, ValueError):
    """The broker would punish this message; nothing was stored and nothing was sent.

    Attributes:
        field: the property at fault, such as ``routing_key``.
        problem: what is wrong with it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigurationError(ReliablePubError, ValueError):
    """An option or an address cannot be used as it is."""


class TopologyError(ReliablePubError):
    """Exchanges, queues or permissions are not what the topology says.

    Attributes:
        problems: all of them, one line each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the broker is not as the topology says: " + "; ".join(problems))
        self.problems: tuple[str, ...] = tuple(problems)


class PublishError(ReliablePubError):
    """A message that will not be sent again: what the broker said, and what to do.

    Attributes:
        message_id: the message's AMQP ``message_id``.
        exchange: where it was published to.
        routing_key: with which routing key.
        reply_code: the broker's code, 0 where it gave none.
        reply_text: the broker's words.
        attempts: how often it was refused before it was given up; of an expired one, how often it
            was sent.
        may_have_arrived: whether a queue may hold it all the same: an attempt may have gone well
            without our hearing of it.
        is_kept: it is parked in the outbox, if there is one; otherwise the policy discarded it.
    """

    what: ClassVar[str] = "was not confirmed"
    remedy: ClassVar[str] = "see the outbox"

    def __init__(
        self,
        *,
        message_id: str,
        exchange: str,
        routing_key: str,
        reply_code: int = 0,
        reply_text: str = "",
        attempts: int = 1,
        may_have_arrived: bool = False,
        is_kept: bool = True,
    ) -> None:
        words = f"{reply_code} {reply_text}" if reply_code else reply_text
        said = f" ({words})" if words else ""
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(
            f"message {message_id} to exchange {exchange!r} with routing key {routing_key!r} "
            f"{self.what}{said}{tried}; {self.remedy if is_kept else DISCARDED}"
        )
        self.message_id = message_id
        self.exchange = exchange
        self.routing_key = routing_key
        self.reply_code = reply_code
        self.reply_text = reply_text
        self.attempts = attempts
        self.may_have_arrived = may_have_arrived
        self.is_kept = is_kept


class Unroutable(PublishError):
    """The broker returned the message: no queue is bound where it was sent (``basic.return``)."""

    what = "was returned: no queue is bound for it"
    remedy = "bind a queue or correct the routing key, then retry it"


class Nacked(PublishError):
    """The broker refused responsibility for the message (``basic.nack``)."""

    what = "was nacked: a queue refused it or failed"
    remedy = "look at the queue's limits and the broker's log, then retry it"


class Refused(PublishError):
    """The broker closed the channel because of this message, or cannot be sent it at all."""

    what = "was refused by the broker"
    remedy = "correct what the broker names, then retry it"


class Expired(PublishError):
    """The message's own deadline passed before it was confirmed."""

    what = "expired before it was confirmed"
    remedy = "retry it if it is still wanted"


class Damaged(PublishError):
    """The message's row in the outbox is not what was stored, so it is parked and never sent."""

    what = "was damaged on the disk before it was confirmed"
    remedy = "see `reliablepub outbox salvage`, and check the disk"


class Withdrawn(PublishError):
    """A person parked or discarded the message before it was confirmed."""

    what = "was withdrawn by a person before it was confirmed"
    remedy = "`reliablepub outbox explain` tells by whom"


class StillOpen(ReliablePubError, TimeoutError):
    """The wait ended before the outcome was known; the message goes on being published."""

    retryable = True


class PublisherClosed(ReliablePubError):
    """The publisher is closed; open a new one."""


class PublisherFailed(PublisherClosed):
    """The publisher's relay has failed: nothing more is published; the log tells why.

    What is not confirmed stays in the outbox, for the next publisher that opens it.
    """


class PublisherForked(ReliablePubError):
    """A publisher cannot be used in a child process; open one there, after the fork."""


class WrongEventLoop(ReliablePubError, RuntimeError):
    """The publisher was opened in another event loop; open one in this loop."""


class WrongThread(ReliablePubError, RuntimeError):
    """A callback on the relay's own thread called what waits for the relay; it would never end."""


class RelayHeldUp(ReliablePubError):
    """The relay waits for a callback of the application's that does not return."""

    retryable = True


class OutboxError(ReliablePubError):
    """Something is wrong with the outbox on disk."""


class OutboxFull(OutboxError):
    """The outbox holds as many open messages, or bytes, as it may; this one was not accepted."""

    retryable = True


class OutboxDiskFull(OutboxError):
    """The disk is full: this message was not accepted; what was accepted before stays."""

    retryable = True


class OutboxDiskFailed(OutboxError):
    """The disk cannot be read or written: this was not stored; what was accepted before stays."""

    retryable = True


class OutboxInUse(OutboxError):
    """Another process relays this outbox."""

    retryable = True


class OutboxLocked(OutboxError):
    """Another process keeps the file locked for too long; the same call may succeed later."""

    retryable = True


class OutboxForked(OutboxError):
    """The file was open when this process was forked, which breaks SQLite's locks in the child."""


class OutboxMoved(OutboxError):
    """The files of the outbox were deleted, moved or replaced while this process had them open."""


class OutboxUnsure(OutboxError):
    """The disk failed while a transaction was being committed: it may or may not be on it."""


class OutboxSealed(OutboxError):
    """A message is encrypted, and its key was not given, or is another one; it stays as it is."""


class NotAnOutbox(OutboxError):
    """The file is no SQLite database, holds no outbox, or one of a newer version."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, ReliablePubError):
        _error.__module__ = "reliablepub"  # what users see and catch; the private path may move
