"""Virtual hosts and permissions, with the texts of RabbitMQ 3.10.8."""

import pika
import pytest
from pamqp import commands
from pamqp.base import Frame

from reliablepub.testing import FakeBroker, NodeOptions, Permissions
from reliablepub.testing.node import Node
from tests.broker.sans_io import Client

OPTIONS = NodeOptions(
    users={"guest": "guest", "ann": "secret"},
    virtual_hosts=("/", "shop"),
    permissions={
        "ann": {
            "shop": Permissions(
                configure="^(c-|amq.gen)", write="^(w-|c-|amq.gen)", read="^(r-|c-)"
            )
        }
    },
)
HEADER = b"AMQP\x00\x00\x09\x01"


def log_in(node: Node, user: str, virtual_host: str) -> Client:
    client = Client(node)
    client.write(HEADER)
    response = f"\0{user}\0{OPTIONS.users[user]}"
    client.send(commands.Connection.StartOk({}, "PLAIN", response), 0)
    client.send(commands.Connection.TuneOk(2047, 131072, 0), 0)
    client.frames.clear()
    client.send(commands.Connection.Open(virtual_host), 0)
    return client


@pytest.fixture
def ann() -> Client:
    """Her channel in a virtual host with queues and exchanges of every kind."""
    node = Node(OPTIONS)
    guest = log_in(node, "guest", "shop")
    guest.send(commands.Channel.Open())
    for name in ("c", "r", "w"):
        guest.send(commands.Queue.Declare(queue=f"{name}-q"))
        guest.send(commands.Exchange.Declare(exchange=f"{name}-x"))
    client = log_in(node, "ann", "shop")
    client.only(commands.Connection.OpenOk)
    client.send(commands.Channel.Open())
    client.frames.clear()
    return client


def test_a_virtual_host_without_permissions_is_closed() -> None:
    close = log_in(Node(OPTIONS), "ann", "/").only(commands.Connection.Close)
    assert (close.reply_code, close.class_id, close.method_id) == (530, 10, 40)
    assert close.reply_text == "NOT_ALLOWED - access to vhost '/' refused for user 'ann'"


def test_who_has_no_permissions_of_his_own_may_do_everything() -> None:
    for virtual_host in OPTIONS.virtual_hosts:
        log_in(Node(OPTIONS), "guest", virtual_host).only(commands.Connection.OpenOk)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        (commands.Queue.Declare(queue="z"), "queue 'z'"),
        (commands.Queue.Delete(queue="z"), "queue 'z'"),
        (commands.Queue.Purge(queue="w-q"), "queue 'w-q'"),
        (commands.Queue.Bind(queue="r-q", exchange="c-x"), "queue 'r-q'"),
        (commands.Queue.Bind(queue="c-q", exchange="w-x"), "exchange 'w-x'"),
        (commands.Queue.Unbind(queue="r-q", exchange="c-x"), "queue 'r-q'"),
        (commands.Exchange.Declare(exchange="z"), "exchange 'z'"),
        (commands.Exchange.Delete(exchange="z"), "exchange 'z'"),
        (commands.Exchange.Bind(destination="r-x", source="c-x"), "exchange 'r-x'"),
        (commands.Exchange.Bind(destination="c-x", source="w-x"), "exchange 'w-x'"),
        (commands.Basic.Get(queue="w-q"), "queue 'w-q'"),
        (commands.Basic.Consume(queue="w-q"), "queue 'w-q'"),
        (
            commands.Queue.Declare(queue="c-d", arguments={"x-dead-letter-exchange": "r-x"}),
            "exchange 'r-x'",
        ),
        (
            commands.Exchange.Declare(exchange="c-a", arguments={"alternate-exchange": "r-x"}),
            "exchange 'r-x'",
        ),
    ],
)
def test_a_right_that_is_missing(ann: Client, method: Frame, what: str) -> None:
    close = ann.call(method, commands.Channel.Close)
    assert close.reply_text == (
        f"ACCESS_REFUSED - access to {what} in vhost 'shop' refused for user 'ann'"
    )
    assert (close.reply_code, close.class_id, close.method_id) == (
        403,
        method.index >> 16,
        method.index & 0xFFFF,
    )


@pytest.mark.parametrize(
    "method",
    [
        commands.Queue.Declare(queue="c-new"),
        commands.Queue.Declare(),
        commands.Queue.Declare(queue="w-q", passive=True),  # asking is free
        commands.Queue.Declare(queue="c-d", arguments={"x-dead-letter-exchange": "w-x"}),
        commands.Queue.Bind(queue="w-q", exchange="r-x"),
        commands.Exchange.Declare(exchange="c-new"),
        commands.Exchange.Declare(exchange="w-x", passive=True),
        commands.Basic.Consume(queue="r-q"),
    ],
)
def test_a_right_that_is_there(ann: Client, method: Frame) -> None:
    ann.send(method)
    assert "Channel.Close" not in ann.names()


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        ("r-x", "ACCESS_REFUSED - access to exchange 'r-x' in vhost 'shop' refused for user 'ann'"),
        ("z", "ACCESS_REFUSED - access to exchange 'z' in vhost 'shop' refused for user 'ann'"),
        (
            "",
            (
                "ACCESS_REFUSED - access to exchange 'amq.default' in vhost 'shop' "
                "refused for user 'ann'"
            ),
        ),
        ("w-z", "NOT_FOUND - no exchange 'w-z' in vhost 'shop'"),
    ],
)
def test_publishing_needs_write(ann: Client, exchange: str, text: str) -> None:
    ann.publish("c-q", exchange=exchange)
    assert ann.only(commands.Channel.Close).reply_text == text


def test_an_empty_expression_matches_no_name() -> None:
    assert not Permissions(write="").allow("write", "q")
    assert Permissions().allow("write", "q")


def test_virtual_hosts_know_nothing_of_each_other() -> None:
    with FakeBroker(options=OPTIONS) as broker:
        broker.declare_queue("c-q", virtual_host="shop")
        broker.declare_exchange("w-x", "fanout", virtual_host="shop")
        broker.bind("c-q", "w-x", virtual_host="shop")
        broker.declare_queue("c-q")
        connection = pika.BlockingConnection(pika.URLParameters(broker.url_of("ann", "shop")))
        connection.channel().basic_publish("w-x", "any", b"one")
        connection.close()
        broker.wait_for(lambda: len(broker.messages("c-q", virtual_host="shop")) == 1, timeout_s=60)
        assert broker.messages("c-q") == ()
        broker.delete_exchange("w-x", virtual_host="shop")
        broker.delete_queue("c-q", virtual_host="shop")
        with pytest.raises(KeyError):
            broker.messages("c-q", virtual_host="shop")
        with pytest.raises(KeyError):
            broker.url_of("bob")


def test_exclusive_queues_go_from_their_own_virtual_host() -> None:
    node = Node(OPTIONS)
    client = log_in(node, "guest", "shop")
    client.send(commands.Channel.Open())
    client.send(commands.Queue.Declare(queue="mine", exclusive=True))
    assert "mine" in node.vhosts["shop"].queues
    client.connection.handle_lost()
    assert "mine" not in node.vhosts["shop"].queues


def test_permissions_may_change_while_who_has_them_is_connected() -> None:
    with FakeBroker(options=OPTIONS) as broker:
        for user, virtual_host in (("guest", "/"), ("ann", "shop")):
            url = pika.URLParameters(broker.url_of(user, virtual_host))
            with pika.BlockingConnection(url) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                nothing = Permissions(configure="", write="", read="")
                broker.set_permissions(user, nothing, virtual_host=virtual_host)
                with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="refused for"):
                    channel.basic_publish("amq.fanout", "", b"")
                broker.set_permissions(user, Permissions(), virtual_host=virtual_host)
                channel = connection.channel()
                channel.confirm_delivery()
                channel.basic_publish("amq.fanout", "", b"")
        with pika.BlockingConnection(pika.URLParameters(broker.url_of("guest", "shop"))):
            pass  # elsewhere nothing has changed


def test_a_password_is_changed_for_the_next_login_and_a_user_is_added() -> None:
    with FakeBroker() as broker:
        old = broker.url
        with pika.BlockingConnection(pika.URLParameters(old)) as connection:
            broker.set_password("guest", "new/1")
            with pytest.raises(pika.exceptions.ProbableAuthenticationError):
                pika.BlockingConnection(pika.URLParameters(old))
            connection.channel()  # a connection that is open stays
        broker.set_password("ann", "second")
        for user in ("guest", "ann"):
            with pika.BlockingConnection(pika.URLParameters(broker.url_of(user))):
                pass
        broker.restart()
        assert "new%2F1" in broker.url
        broker.reset()
        assert broker.url == old
        with pytest.raises(KeyError):
            broker.url_of("ann")


def test_a_user_may_have_so_many_channels_on_all_connections() -> None:
    with FakeBroker(options=NodeOptions(user_channel_max={"guest": 2})) as broker:
        first, second, third = (
            pika.BlockingConnection(pika.URLParameters(broker.url)) for _ in range(3)
        )
        first.channel()
        channel = second.channel()
        text = "number of channels opened for user 'guest' has reached the maximum allowed user"
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match=text) as caught:
            third.channel()
        assert caught.value.reply_code == 530
        channel.close()
        first.channel()
        first.close()
        second.close()
