"""Hooks tell what happened, whichever front door and broker it is."""

import threading
from collections import Counter
from collections.abc import Sequence

from reliablepub import Message, hooks
from tests.amqp_probe import AmqpProbe
from tests.conformance.conftest import FrontDoor
from tests.policies import AT_ONCE
from tests.stores import Where


class Journal:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: list[hooks.AttemptEnded] = []
        self.threads: set[str] = set()

    def on_stored(self, events: Sequence[hooks.MessageStored]) -> None:
        self.counts["stored"] += len(events)
        self.threads.add(threading.current_thread().name)

    def on_sent(self, events: Sequence[hooks.AttemptBegun]) -> None:
        self.counts["sent"] += len(events)

    def on_confirmed(self, events: Sequence[hooks.AttemptEnded]) -> None:
        self.counts["confirmed"] += len(events)
        assert all(event.latency_s > 0 for event in events)

    def on_returned(self, events: Sequence[hooks.AttemptEnded]) -> None:
        self.counts["returned"] += len(events)

    def on_refused(self, events: Sequence[hooks.AttemptEnded]) -> None:
        self.refused += events

    def on_parked(self, events: Sequence[hooks.MessageGivenUp]) -> None:
        self.counts["parked"] += len(events)

    def on_connected(self, events: Sequence[hooks.LinkChanged]) -> None:
        raise RuntimeError("a hook may fail")


def test_everything_that_happens_is_told_once(
    broker: AmqpProbe, outbox: Where, front_door: FrontDoor
) -> None:
    queue, journal = broker.declare_queue(), Journal()
    good = [Message(b"x", routing_key=queue) for _ in range(50)]
    lost = [Message(b"x", routing_key="nobody-is-bound-here") for _ in range(3)]
    bad = Message(b"x", exchange="no-such-exchange", message_id="bad")
    with front_door(broker.url, outbox=outbox, retry=AT_ONCE, hooks=[journal]) as publisher:
        publisher.publish_many([*good, *lost]).wait(60)
        publisher.publish_many([bad]).wait(60)
        status = publisher.flush(60)
    assert journal.counts == {"stored": 54, "sent": 54, "confirmed": 50, "returned": 3, "parked": 4}
    [refused] = journal.refused
    assert (refused.message_id, refused.outcome.reply_code) == ("bad", 404)
    assert journal.threads == {"reliablepub-relay"}
    assert status.callback_errors == 1
