"""The scripts that every client plays: faults of the broker, and the letters published meanwhile.

Faults name the letter they are for by its routing key, and act once: whatever a client sends again
meets a healthy broker. Where something ends, what was sent before is confirmed late, so that it is
undecided for a client that has it in flight, every time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from reliablepub.testing import FakeBroker, faults
from tests.clients.letters import Letter

STARTED_S = 60.0
LATER_S = 0.5
AFTER_THE_TIMEOUT_S = 1.5
LONG_S = 2.5


@dataclass(frozen=True)
class Script:
    """One row of the table.

    Attributes:
        story: What the broker does, in a sentence.
        letters: Published in this order. Their names are queues, but for `nowhere`.
        faults: Injected before.
        act: Called while the letters are under way.
    """

    title: str
    story: str
    letters: tuple[Letter, ...]
    faults: tuple[faults.Fault, ...] = ()
    act: Callable[[FakeBroker], None] | None = None


def letters(*names: str) -> tuple[Letter, ...]:
    return tuple(Letter(name) for name in names)


def late(name: str, for_s: float) -> faults.Fault:
    return faults.DelayConfirm(for_s=for_s, routing_key=name)


def release_when_three_wait(broker: FakeBroker) -> None:
    """Let the confirms go once three publishes wait for them, or the client has only one."""
    with suppress(TimeoutError):
        broker.wait_for(1, timeout_s=STARTED_S)
        broker.wait_for(3, timeout_s=LATER_S)
    broker.release_confirms()


SCRIPTS = (
    Script("all is well", "Three messages are acked.", letters("one", "two", "three")),
    Script(
        "nack",
        "The second of three is refused with basic.nack.",
        letters("one", "two", "three"),
        (faults.Nack(routing_key="two"),),
    ),
    Script(
        "unroutable, mandatory",
        "The second of three has no queue: basic.return, then its ack. The third is nacked, later.",
        letters("one", "nowhere", "three"),
        (faults.Nack(routing_key="three"), late("three", LATER_S)),
    ),
    Script(
        "unroutable, by default",
        "The same, with the client's defaults instead of `mandatory`.",
        (Letter("nowhere", mandatory=None), Letter("two", mandatory=None)),
    ),
    Script(
        "return, then nack",
        "The first is returned and then nacked; the second is taken.",
        letters("one", "two"),
        (faults.Return(routing_key="one"), faults.Nack(routing_key="one")),
    ),
    Script(
        "late ack after a timeout",
        "The first is acked after its sender's timeout; the second is nacked, later.",
        letters("one", "two"),
        (late("one", AFTER_THE_TIMEOUT_S), faults.Nack(routing_key="two"), late("two", LONG_S)),
    ),
    Script(
        "no confirm ever",
        "The first is taken and never confirmed; the second is taken and acked.",
        letters("one", "two"),
        (faults.DropConfirm(routing_key="one"),),
    ),
    Script(
        "one message_id, twice in flight",
        "Two messages share a `message_id`; the first is unroutable, the second is taken. "
        "The network is slow, so that both are in flight.",
        (Letter("nowhere", message_id="same"), Letter("two", message_id="same")),
        (faults.Latency(delay_s=0.1),),
    ),
    Script(
        "404 in the middle of a window",
        "The third of five goes to an exchange that does not exist: channel.close.",
        (*letters("one", "two"), Letter("three", exchange="nowhere"), *letters("four", "five")),
        (late("one", LATER_S), late("two", LATER_S)),
    ),
    Script(
        "channel closed between",
        "At the second of three, which the queue takes, the broker closes the channel with 406.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.CloseChannel(routing_key="two", accepted=True)),
    ),
    Script(
        "connection lost, message taken",
        "The connection is reset when the queue has taken the second of three, before its ack.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.DropConnection(routing_key="two", accepted=True)),
    ),
    Script(
        "connection lost, message lost",
        "The connection is reset before the queue takes the second of three.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.DropConnection(routing_key="two")),
    ),
    Script(
        "half-open connection",
        "From the second of three on, the broker is silent and the connection stays open.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.HalfOpen(routing_key="two")),
    ),
    Script(
        "the broker crashes",
        "It dies before it has taken the second of three, and is back after half a second.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.Crash(routing_key="two", down_for_s=LATER_S)),
    ),
    Script(
        "multiple ack over a returned tag",
        "Of three in flight the second is returned; then one ack, `multiple`, covers all.",
        letters("one", "nowhere", "three"),
        (faults.HoldConfirms(),),
        release_when_three_wait,
    ),
    Script(
        "confirms out of order",
        "The second of three is nacked at once, the first acked later.",
        letters("one", "two", "three"),
        (late("one", LATER_S), faults.Nack(routing_key="two")),
    ),
    Script(
        "duplicate ack",
        "The first is acked twice; the second is nacked, later.",
        letters("one", "two"),
        (
            faults.DuplicateConfirm(routing_key="one"),
            faults.Nack(routing_key="two"),
            late("two", LATER_S),
        ),
    ),
    Script(
        "ack of an unknown tag",
        "With the ack of the first comes one for tag 99; the second is nacked, later.",
        letters("one", "two"),
        (
            faults.StrayAck(tag=99, routing_key="one"),
            faults.Nack(routing_key="two"),
            late("two", LATER_S),
        ),
    ),
    Script(
        "blocked",
        "An alarm withholds the first for a second and a half; both are taken then.",
        letters("one", "two"),
        (faults.Block(routing_key="one", for_s=AFTER_THE_TIMEOUT_S),),
    ),
)
