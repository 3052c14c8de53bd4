"""Exceptions. Each text says what happened, to which message, and what to do.

Knows: the kinds of failure, and which of them are retryable. Must never know: sockets, SQL, clocks.

    ReliablePubError
    ├── InvalidMessage        the broker would reject the message; it was not stored or sent
    ├── ConfigurationError    an option, a URL or a policy is invalid
    ├── TopologyError         the broker's exchanges or queues differ from the topology
    ├── PublishError          final outcome of a message that was not confirmed
    │   ├── Unroutable        no queue is bound for the message (basic.return)
    │   ├── Nacked            the broker refused responsibility (basic.nack)
    │   ├── Refused           the message made the broker close a channel, or cannot be encoded
    │   ├── Expired           the message's deadline passed before it was confirmed
    │   ├── Damaged           the message's row in the outbox is corrupt; parked, not sent
    │   └── Withdrawn         an operator parked or discarded the message before it was confirmed
    ├── StillOpen             the wait timed out; the message is still being published
    ├── PublisherClosed       the publisher is closed
    │   └── PublisherFailed   the publisher's relay has failed
    ├── PublisherForked       the publisher was opened in a parent process
    ├── WrongEventLoop        the publisher was opened in another event loop
    ├── WrongThread           a callback on the relay's thread called a method that waits for it
    ├── RelayHeldUp           the relay waits for a callback that does not return
    └── OutboxError           the outbox on disk cannot be used
        ├── OutboxFull        the outbox's limit of messages or bytes is reached
        ├── OutboxDiskFull    the disk is full
        ├── OutboxDiskFailed  the disk cannot be read or written; nothing was stored
        ├── OutboxInUse       another process relays the outbox
        ├── OutboxLocked      another process kept the file locked for too long
        ├── OutboxForked      the file was open when this process was forked
        ├── OutboxMoved       the files were deleted, moved or replaced while they were open
        ├── OutboxSealed      a message is encrypted, and its key was not given
        ├── OutboxUnreachable the database of the outbox cannot be reached; nothing was stored
        ├── OutboxUnsure      a commit was cut off; the message may or may not be stored
        └── NotAnOutbox       the file is not an outbox, or is one of another version

Every error can be pickled (Spark sends errors between processes). No error holds a body or a
password.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from reliablepub.printable import printable


class ReliablePubError(Exception):
    """The base class of all exceptions that reliablepub raises on purpose.

    Attributes:
        retryable: whether the identical call may succeed later without an operator's action.
    """

    retryable: bool = False

    def __str__(self) -> str:
        """The text, with control characters escaped: safe for a terminal and for a log."""
        return printable(super().__str__())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state, so that a subclass may have any constructor."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[ReliablePubError], args: tuple[object, ...], state: dict[str, object]
) -> ReliablePubError:
    error = kind.__new__(kind, *args)  # not `kind(...)`: `args` are not its parameters
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidMessage(ReliablePubError, ValueError):
    """The broker would reject this message with an error; nothing was stored or sent.

    Attributes:
        field: name of the invalid field, such as ``routing_key``.
        problem: what is wrong with the field.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigurationError(ReliablePubError, ValueError):
    """An option, a URL or a policy is invalid."""


class TopologyError(ReliablePubError):
    """Exchanges, queues or permissions on the broker differ from the topology.

    Attributes:
        problems: all differences, one line each.
    """

    def __init__(
        self, problems: Sequence[str], said: str = "the broker is not as the topology says"
    ) -> None:
        super().__init__(f"{said}: {'; '.join(problems)}")
        self.problems: tuple[str, ...] = tuple(problems)


class PublishError(ReliablePubError):
    """A message was not confirmed and will not be sent again.

    Attributes:
        message_id: AMQP ``message_id``.
        exchange: exchange it was published to.
        routing_key: routing key it was published with.
        reply_code: the broker's reply code; 0 if it sent none.
        reply_text: the broker's reply text.
        attempts: number of attempts that ended without a confirm, including those with an unknown
            outcome; 0 if there were none. Always 0 for `Damaged` and `Withdrawn`, whose attempts
            are not counted.
        may_have_arrived: whether a queue may hold the message: an attempt may have succeeded
            although its confirm never arrived. Always True for `Damaged`, whose attempts are not
            known.
        is_kept: True if the message is parked (in the outbox, if there is one); False if the retry
            policy or the operator discarded it.
    """

    what: ClassVar[str] = "was not confirmed"
    remedy: ClassVar[str] = "see the outbox"
    _if_arrived: ClassVar[str] = "{remedy}"
    _discarded: ClassVar[str] = "the retry policy discarded it"

    def __init__(
        self,
        *,
        message_id: str,
        exchange: str,
        routing_key: str,
        reply_code: int = 0,
        reply_text: str = "",
        attempts: int = 0,
        may_have_arrived: bool = False,
        is_kept: bool = True,
    ) -> None:
        words = f"{reply_code} {reply_text}" if reply_code else reply_text
        said = f" ({words})" if words else ""
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        advice = self.advice(may_have_arrived=may_have_arrived)
        if not is_kept:
            advice = self._discarded + "; it may have arrived" * may_have_arrived
        super().__init__(
            f"message {message_id} to exchange {exchange!r} with routing key {routing_key!r} "
            f"{self.what}{said}{tried}; {advice}"
        )
        self.message_id = message_id
        self.exchange = exchange
        self.routing_key = routing_key
        self.reply_code = reply_code
        self.reply_text = reply_text
        self.attempts = attempts
        self.may_have_arrived = may_have_arrived
        self.is_kept = is_kept

    @classmethod
    def advice(cls, *, may_have_arrived: bool) -> str:
        """What to do about a parked message with this error."""
        return cls._if_arrived.format(remedy=cls.remedy) if may_have_arrived else cls.remedy


_LOOK_FIRST: Final = "it may have arrived, so look for it first; if it has not, {remedy}"


class Unroutable(PublishError):
    """The broker returned the message (``basic.return``): no queue is bound for its routing key."""

    what = "was returned: no queue is bound for it"
    remedy = "bind a queue or correct the routing key, then retry it"
    _if_arrived = _LOOK_FIRST


class Nacked(PublishError):
    """The broker refused responsibility for the message (``basic.nack``)."""

    what = "was nacked: a queue refused it or failed"
    remedy = "look at the queue's limits and the broker's log, then retry it"
    _if_arrived = _LOOK_FIRST


class Refused(PublishError):
    """The message made the broker close the channel or connection, or it cannot be encoded."""

    what = "was refused by the broker"
    remedy = "correct what the broker names, then retry it"
    _if_arrived = _LOOK_FIRST


class Expired(PublishError):
    """The message's deadline (``expires_in_s``) passed before the message was confirmed."""

    what = "expired before it was confirmed"
    remedy = "retry it if it is still wanted"


class Damaged(PublishError):
    """The message's row in the outbox is corrupt; the relay parks the message and sends nothing."""

    what = "was damaged on the disk before it was confirmed"
    remedy = "see `reliablepub outbox salvage`, and check the disk"


class Withdrawn(PublishError):
    """An operator parked or discarded the message before it was confirmed."""

    what = "was parked or discarded by an operator before it was confirmed"
    remedy = _discarded = "`reliablepub outbox explain` names the operator"


class StillOpen(ReliablePubError, TimeoutError):
    """The wait timed out before the outcome was known; the message is still being published."""

    retryable = True


class PublisherClosed(ReliablePubError):
    """The publisher is closed; open a new one."""


class PublisherFailed(PublisherClosed):
    """The publisher's relay has failed, and publishes nothing more. The log gives the cause.

    Unconfirmed messages stay in the outbox; the next publisher that opens it publishes them.
    """


class PublisherForked(ReliablePubError):
    """A publisher cannot be used in a child process; open one there, after the fork."""


class WrongEventLoop(ReliablePubError, RuntimeError):
    """The publisher was opened in another event loop; open one in this loop."""


class WrongThread(ReliablePubError, RuntimeError):
    """A callback on the relay's thread called a method that waits for the relay: a deadlock."""


class RelayHeldUp(ReliablePubError):
    """The relay is waiting for an application callback that does not return."""

    retryable = True


class OutboxError(ReliablePubError):
    """The outbox on disk cannot be used; the text says why."""


class OutboxFull(OutboxError):
    """The outbox's limit of open messages or bytes is reached; this message was not accepted."""

    retryable = True


class OutboxDiskFull(OutboxError):
    """The disk is full; this message was not accepted. Messages accepted earlier are safe."""

    retryable = True


class OutboxDiskFailed(OutboxError):
    """The disk cannot be read or written; this call stored nothing.

    Messages that were accepted earlier stay in the outbox.
    """

    retryable = True


class OutboxInUse(OutboxError):
    """Another process relays this outbox."""

    retryable = True


class OutboxLocked(OutboxError):
    """Another process kept the file or a table locked for too long, or a fork took too long.

    A later call may succeed.
    """

    retryable = True


class OutboxForked(OutboxError):
    """The file was open when this process was forked; SQLite's locks do not hold in the child."""


class OutboxMoved(OutboxError):
    """The files of the outbox were deleted, moved or replaced while this process had them open."""


class OutboxUnreachable(OutboxError):
    """The database server of the outbox cannot be reached, or refuses connections."""

    retryable = True


class OutboxUnsure(OutboxError):
    """A commit was cut off by a failure; the message may or may not be stored."""


class OutboxSealed(OutboxError):
    """A message is encrypted, and its key is missing or wrong; the message is kept."""


class NotAnOutbox(OutboxError):
    """The file is not a SQLite database, holds no outbox, or holds one of another version."""


for _error in list(globals().values()):
    if isinstance(_error, type) and issubclass(_error, ReliablePubError):
        # Tracebacks and pickles name the public path; the module may move.
        _error.__module__ = "reliablepub"
