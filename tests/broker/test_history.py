"""What is remembered of publishes is bounded, by count and by bytes."""

from reliablepub.testing import FakeBroker
from reliablepub.testing.options import NodeOptions
from tests.broker.sans_io import Client, node_with_queue


def remembered(options: NodeOptions, bodies: list[bytes]) -> list[bytes]:
    node = node_with_queue(options)
    client = Client(node).open()
    for body in bodies:
        client.publish(content=body)
    assert node.history.total == len(bodies)
    return [publish.body for publish in node.history.snapshot()]


def test_the_oldest_are_forgotten() -> None:
    assert remembered(NodeOptions(history_max=2), [b"1", b"2", b"3"]) == [b"2", b"3"]


def test_large_bodies_push_out_more() -> None:
    options = NodeOptions(history_bytes_max=10)
    assert remembered(options, [b"12345", b"67890", b"a"]) == [b"67890", b"a"]
    assert remembered(options, [b"1", b"2", b"too large to keep"]) == [b"too large to keep"]


def test_properties_of_a_record_are_a_copy() -> None:
    with FakeBroker() as broker:
        broker.declare_queue("q")
        broker.publish(b"x", "q", properties={"headers": {"n": 1}})
        (seen,) = broker.messages("q")
        assert seen.properties.headers is not None
        seen.properties.headers["n"] = 2
        (again,) = broker.messages("q")
        assert again.properties.headers == {"n": 1}
