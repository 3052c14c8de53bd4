"""A broker that says what no broker says: the connection ends with a reason, nothing is kept."""

from collections.abc import Callable, Iterator

import pytest
from pamqp import body, commands, frame, header
from yarl import URL

from reliablepub.transport.pika_hooks import hooks
from tests.chaos.proxy import Proxy
from tests.conformance.conftest import FrontDoor, is_guest
from tests.conformance.rig import Rig
from tests.stores import Where
from tests.waiting import until

PART = frame.marshal(body.ContentBody(bytes(100_000)), 1)


def returned(body_bytes: int, number: int = 1) -> bytes:
    properties = commands.Basic.Properties(message_id="nobody's")
    return frame.marshal(commands.Basic.Return(312, "NO_ROUTE", "", "q"), number) + frame.marshal(
        header.ContentHeader(0, body_bytes, properties), number
    )


@pytest.fixture
def proxied() -> Iterator[Callable[[str], Proxy]]:
    proxies: list[Proxy] = []

    def build(url: str) -> Proxy:
        port = URL(url).port
        assert port is not None
        proxies.append(Proxy(port).__enter__())
        return proxies[-1]

    yield build
    for proxy in proxies:
        proxy.__exit__(None, None, None)


@pytest.mark.parametrize(
    "lie",
    [
        (b"\x01\x00\x00\xff\xff\xff\xff", "began a frame of 4294967303 bytes, and 131072 are"),
        (returned(5), "the broker returned an unknown message"),
        (returned(2**62), "the broker returned an unknown message"),
        (PART, "an unexpected message or part of a message"),
        (returned(5, number=9), "an unexpected message or part of a message"),
    ],
    ids=["frame of 4 GiB", "return", "return of 4 EiB", "body", "return on no channel"],
)
def test_it_ends_the_connection_with_a_reason(
    rig: Rig,
    outbox: Where,
    front_door: FrontDoor,
    proxied: Callable[[str], Proxy],
    lie: tuple[bytes, str],
) -> None:
    if is_guest(front_door):
        pytest.skip("what aiormq reads is bounded by aiormq alone")
    words, reason = lie
    before = hooks.why_off()
    queue, proxy = rig.probe.declare_queue(), proxied(rig.url)
    reasons: list[str] = []

    class Hook:
        def on_disconnected(self, events: list[object]) -> None:
            reasons.extend(event.reason for event in events)  # type: ignore[attr-defined]

    with front_door(proxy.url, outbox=outbox, hooks=[Hook()]) as publisher:
        publisher.publish(b"before", routing_key=queue).result(60)
        proxy.inject(words)
        until(lambda: publisher.status.connects == 2)
        publisher.publish(b"after", routing_key=queue).result(60)
        assert publisher.status.hooks_off == before
    assert reason in reasons[0]
    assert f"127.0.0.1:{proxy.port}: " in reasons[0]
    assert {arrived for arrived, _ in rig.probe.drain(queue, 2)} == {b"before", b"after"}
