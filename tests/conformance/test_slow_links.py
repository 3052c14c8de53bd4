"""On a slow link a message may take longer than a confirm: it is sent once, and confirmed."""

import time
from collections.abc import Callable, Iterator

import pytest
from yarl import URL

from reliablepub import Message, RetryPolicy
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DropConfirm, HoldConfirms
from tests.chaos.proxy import Proxy
from tests.conformance.conftest import FrontDoor
from tests.conformance.rig import Rig
from tests.conformance.test_survival import uncertain
from tests.stores import Where
from tests.waiting import until

BYTES_PER_S = 400_000
TIMEOUT_S = 1.5
HELD_BYTES = 16 * 1024
"""What a message may be ahead of the proxy; what it holds is gone as far as we can see."""

Link = Callable[[str], str]


@pytest.fixture
def slow() -> Iterator[Callable[[str], str]]:
    """Make a URL that leads there through a slow link."""
    proxies: list[Proxy] = []

    def build(url: str) -> str:
        port = URL(url).port
        assert port is not None
        proxy = Proxy(port, held_bytes=HELD_BYTES)
        proxies.append(proxy.__enter__())
        proxy.bytes_per_s = BYTES_PER_S
        return proxy.url

    yield build
    for proxy in proxies:
        proxy.__exit__(None, None, None)


def in_one_of_three(holds: Callable[[], bool]) -> bool:
    """A busy machine may stand still for longer than a confirm may take, but not three times."""
    return any(holds() for _ in range(3))


def assert_sent_once(publish: Callable[[], None], outbox: Where) -> None:
    def is_sent_once() -> bool:
        before = uncertain(outbox)
        publish()
        return uncertain(outbox) == before

    assert in_one_of_three(is_sent_once), "it was sent again each time"


def test_a_message_that_takes_longer_than_a_confirm_is_sent_once(
    rig: Rig, outbox: Where, front_door: FrontDoor, slow: Link
) -> None:
    body = bytes(1_000_000)
    with front_door(slow(rig.url), outbox=outbox, confirm_timeout_s=TIMEOUT_S) as publisher:

        def publish() -> None:
            queue, since = rig.probe.declare_queue(), time.monotonic()
            publisher.publish(body, routing_key=queue).result(60)
            assert time.monotonic() - since > TIMEOUT_S
            arrived, *_ = rig.probe.drain(queue, 1)
            assert arrived[0] == body

        assert_sent_once(publish, outbox)


def test_what_a_proxy_holds_unseen_is_sent_a_few_times_and_not_for_ever(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor
) -> None:
    """It takes in all of it at once: bytes that have left, as far as can be seen."""
    fake.declare_queue("q")
    with Proxy(fake.port) as proxy:
        proxy.bytes_per_s = 200_000
        with front_door(proxy.url, outbox=outbox, confirm_timeout_s=1.0) as publisher:
            publisher.publish(bytes(500_000), routing_key="q").result(60)
    assert len(fake.messages("q")) <= 4


def test_a_batch_of_large_messages_is_sent_once(
    rig: Rig, outbox: Where, front_door: FrontDoor, slow: Link
) -> None:
    with front_door(slow(rig.url), outbox=outbox, confirm_timeout_s=TIMEOUT_S) as publisher:

        def publish() -> None:
            queue = rig.probe.declare_queue()
            receipt = publisher.publish_many(
                Message(bytes([n]) * 120_000, routing_key=queue) for n in range(8)
            )
            assert receipt.wait(60).confirmed == 8
            arrived = [body[0] for body, _ in rig.probe.drain(queue, 8)]
            assert list(dict.fromkeys(arrived)) == list(range(8))

        assert_sent_once(publish, outbox)


def test_a_channel_opens_however_much_is_on_its_way_before_it(
    rig: Rig, outbox: Where, front_door: FrontDoor, slow: Link
) -> None:
    """The channel after one that a message has cost opens in time."""
    options = {"confirm_timeout_s": TIMEOUT_S, "retry": RetryPolicy.prompt()}
    with front_door(slow(rig.url), outbox=outbox, **options) as publisher:

        def opens_in_time() -> bool:
            queue, connects = rig.probe.declare_queue(), publisher.status.connects or 1
            messages = [Message(bytes(120_000), routing_key=queue) for _ in range(5)]
            messages.insert(0, Message(b"", exchange=f"no-{queue}"))
            receipt = publisher.publish_many(messages)
            receipt.wait(60)
            assert receipt.confirmed == 5
            arrived = len(rig.probe.drain(queue, 5))
            return (arrived, publisher.status.connects) == (5, connects)

        assert in_one_of_three(opens_in_time)


@pytest.mark.parametrize("size", [1_000, 16_000_000])
def test_a_broker_that_takes_no_bytes_is_given_up_in_time(
    rig: Rig, outbox: Where, front_door: FrontDoor, size: int
) -> None:
    queue = rig.probe.declare_queue()
    with front_door(
        rig.url, outbox=outbox, confirm_timeout_s=TIMEOUT_S, window_bytes_max=32_000_000
    ) as publisher:
        publisher.publish(b"first", routing_key=queue).result(60)
        rig.freeze()
        frozen_at = time.monotonic()
        messages = [Message(bytes(min(size, 900_000)), routing_key=queue)] * (size // 900_000 + 1)
        receipt = publisher.publish_many(messages)
        until(lambda: uncertain(outbox) > 0, timeout_s=60)
        # By its confirms: heartbeats would tell after 20 s.
        assert time.monotonic() - frozen_at < 10 * TIMEOUT_S
        rig.thaw()
        assert receipt.wait(60).confirmed == len(messages)
    rig.probe.drain(queue, 1 + len(messages))


def test_a_broker_that_takes_bytes_and_confirms_nothing_is_given_up(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor, slow: Link
) -> None:
    fake.declare_queue("q")
    messages = [Message(bytes(100_000), routing_key="q")] * 3
    with front_door(slow(fake.url), outbox=outbox, confirm_timeout_s=TIMEOUT_S) as publisher:

        def is_sent_twice() -> bool:
            before = fake.published_count
            fake.inject(HoldConfirms(times=3))
            assert publisher.publish_many(messages).wait(60).confirmed == 3
            return fake.published_count - before == 6

        assert in_one_of_three(is_sent_twice)


def test_a_confirm_that_is_missing_is_noticed_while_bytes_leave_all_the_time(
    fake: FakeBroker, outbox: Where, front_door: FrontDoor, slow: Link
) -> None:
    fake.declare_queue("q")
    fake.inject(DropConfirm(nth=2))
    options = {"confirm_timeout_s": TIMEOUT_S, "window_bytes_max": 300_000}
    with front_door(slow(fake.url), outbox=outbox, **options) as publisher:
        receipt = publisher.publish_many([Message(bytes(50_000), routing_key="q")] * 40)
        until(lambda: uncertain(outbox) > 0)
        assert receipt.confirmed < 35, "long before the last byte has left"
        assert receipt.wait(60).confirmed == 40
