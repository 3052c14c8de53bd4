"""Where messages go, and what survives a restart."""

from typing import Any

from pamqp.commands import Basic
from pamqp.header import ContentHeader

from reliablepub.testing.history import Fate, Publish
from reliablepub.testing.queues import Queue
from reliablepub.testing.routing import Binding, Exchange, VirtualHost, new_binding

BODY = b"body"


def publish(
    exchange: str,
    key: str,
    headers: dict[str, Any] | None = None,
    *,
    persistent: bool = True,
    expiration: str | None = None,
) -> Publish:
    properties = Basic.Properties(
        headers=headers, delivery_mode=2 if persistent else 1, expiration=expiration
    )
    header = ContentHeader(0, len(BODY), properties).marshal()
    return Publish(
        exchange=exchange,
        routing_key=key,
        mandatory=True,
        header=header,
        body=BODY,
        connection=1,
        channel=1,
        fate=Fate.ACCEPTED,
    )


def vhost_with(*queues: str, **exchanges: str) -> VirtualHost:
    vhost = VirtualHost("/")
    for name in queues:
        vhost.add_queue(Queue(name, durable=True))
    for name, kind in exchanges.items():
        vhost.add_exchange(Exchange(name, kind, durable=True))
    return vhost


def names(vhost: VirtualHost, one: Publish) -> list[str]:
    return sorted(queue.name for queue in vhost.route(one))


def bind(vhost: VirtualHost, source: str, queue: str, key: str = "", **arguments: Any) -> None:
    vhost.bind(source, new_binding(queue, key, arguments))


def test_direct_fanout_and_headers_exchanges() -> None:
    vhost = vhost_with("a", "b", d="direct", f="fanout", h="headers")
    bind(vhost, "d", "a", "one")
    bind(vhost, "d", "b", "two")
    bind(vhost, "f", "a")
    bind(vhost, "f", "b", "ignored")
    bind(vhost, "h", "b", kind="order")
    assert names(vhost, publish("d", "one")) == ["a"]
    assert names(vhost, publish("d", "three")) == []
    assert names(vhost, publish("f", "any")) == ["a", "b"]
    assert names(vhost, publish("h", "", {"kind": "order"})) == ["b"]
    assert names(vhost, publish("h", "", {"kind": "bill"})) == []


def test_a_queue_that_is_reached_twice_gets_one_copy() -> None:
    vhost = vhost_with("a", t="topic")
    bind(vhost, "t", "a", "#")
    bind(vhost, "t", "a", "x.*")
    assert names(vhost, publish("t", "x.y")) == ["a"]


def test_exchange_to_exchange_bindings_end_even_in_a_circle() -> None:
    vhost = vhost_with("a", x="fanout", y="fanout")
    vhost.bind("x", Binding("y", to_exchange=True, routing_key=""))
    vhost.bind("y", Binding("x", to_exchange=True, routing_key=""))
    assert names(vhost, publish("x", "")) == []
    bind(vhost, "y", "a")
    assert names(vhost, publish("x", "")) == ["a"]


def test_unbind_and_deletions_stop_the_routing() -> None:
    vhost = vhost_with("a", "b", x="direct")
    bind(vhost, "x", "a", "k")
    bind(vhost, "x", "b", "k")
    vhost.unbind("x", Binding("a", to_exchange=False, routing_key="k"))
    assert names(vhost, publish("x", "k")) == ["b"]
    assert vhost.remove_queue("b").is_deleted
    assert names(vhost, publish("x", "k")) == []
    vhost.remove_exchange("x")
    assert names(vhost, publish("x", "k")) == []


def test_a_queue_has_so_many_bytes() -> None:
    few = Queue("q", arguments={"x-max-length-bytes": 8})
    for _ in range(3):
        few.offer(publish("", "k"), 0.0)
        few.trim()
    assert (len(few.ready), few.ready_bytes) == (2, 8)


def test_messages_expire_by_the_shorter_ttl() -> None:
    queue = Queue("q", arguments={"x-message-ttl": 1000})
    queue.offer(publish("", "k", expiration="10"), 0.0)
    queue.offer(publish("", "k"), 0.0)
    queue.expire(0.009)
    assert len(queue.ready) == 2
    queue.expire(0.011)
    assert len(queue.ready) == 1
    queue.expire(1.001)
    assert not queue.ready


def test_requeued_messages_are_back_in_their_place() -> None:
    queue = Queue("q")
    for i in range(4):
        queue.offer(publish("", f"{i}"), 0.0)
    first, second = queue.take(), queue.take()
    queue.requeue([second, first])
    assert [entry.publish.routing_key for entry in queue.ready] == ["0", "1", "2", "3"]
    assert [entry.redelivered for entry in queue.ready] == [True, True, False, False]


def test_a_full_quorum_queue_refuses_until_it_has_room_again() -> None:
    arguments = {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-max-length": 5}
    queue = Queue("q", durable=True, arguments=arguments)

    def is_taken() -> bool:
        is_taken = queue.offer(publish("", "q"), 0.0) is not None
        queue.trim()
        return is_taken

    assert [is_taken() for _ in range(8)] == [True] * 6 + [False] * 2
    queue.take()
    assert not is_taken()
    queue.take()  # four of five: 80 %
    assert is_taken()


def test_a_quorum_queue_keeps_transient_messages_that_are_written() -> None:
    queue = Queue("q", durable=True, arguments={"x-queue-type": "quorum"})
    for is_written in (True, False):
        entry = queue.offer(publish("", "q", persistent=False), 0.0)
        assert entry is not None
        entry.written = is_written
    assert len(queue.lose(keep_unwritten=False)) == 1
    assert len(queue.ready) == 1


def test_a_restart_keeps_what_is_durable_and_written() -> None:
    vhost = vhost_with("durable", x="direct")
    vhost.add_queue(Queue("brief"))
    vhost.add_exchange(Exchange("y", "direct"))
    bind(vhost, "x", "durable", "k")
    bind(vhost, "x", "brief", "k")
    bind(vhost, "y", "durable", "k")
    sent = [publish("x", "k"), publish("x", "k"), publish("x", "k", persistent=False)]
    for one in sent:
        for queue in vhost.route(one):
            entry = queue.offer(one, 0.0)
            assert entry is not None
            entry.written = one is sent[0]
    vhost.restart(keep_unwritten=False)
    assert sorted(vhost.queues) == ["durable"]
    assert "x" in vhost.exchanges
    assert "y" not in vhost.exchanges
    assert [entry.publish for entry in vhost.queues["durable"].ready] == sent[:1]
    assert [one.fate for one in sent] == [Fate.ACCEPTED, Fate.LOST, Fate.LOST]
    assert names(vhost, publish("x", "k")) == ["durable"]
