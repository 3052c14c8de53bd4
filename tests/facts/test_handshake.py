"""The opening of a connection, and how it is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from tests.facts.conftest import Connect
from tests.facts.raw_client import END, RawClient
from tests.facts.site import Site


def test_what_the_server_offers(connect: Connect) -> None:
    start = connect().start()
    assert (start.version_major, start.version_minor) == (0, 9)
    assert {"PLAIN", "AMQPLAIN"} <= set(start.mechanisms.split())
    assert start.server_properties["product"] == "RabbitMQ"
    assert start.server_properties["capabilities"] == {
        "authentication_failure_close": True,
        "basic.nack": True,
        "connection.blocked": True,
        "consumer_cancel_notify": True,
        "consumer_priorities": True,
        "direct_reply_to": True,
        "exchange_exchange_bindings": True,
        "per_consumer_qos": True,
        "publisher_confirms": True,
    }


def test_what_it_proposes(connect: Connect) -> None:
    client = connect()
    client.start()
    client.log_in()
    assert client.told() == ["connection.tune 2047 131072 60"]


def test_a_wrong_name_or_password_is_told(connect: Connect) -> None:
    clients = connect(), connect()
    for client, response in zip(clients, ("\0guest\0wrong", "\0stranger\0guest"), strict=True):
        client.start()
        client.log_in(response=response)
    text = (
        "ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN. "
        "For details see the broker logfile."
    )
    for client in clients:
        assert client.told() == [f"connection.close 403 {text} (0, 0)"]


def test_amqplain(connect: Connect) -> None:
    client = connect()
    client.start()
    login = b"\x05LOGINS\0\0\0\x05guest\x08PASSWORDS\0\0\0\x05guest"
    client.log_in(mechanism="AMQPLAIN", response=login.decode())
    client.hear_only(commands.Connection.Tune)
    client.enter()
    client.hear_only(commands.Connection.OpenOk)


def test_a_virtual_host_that_does_not_exist(connect: Connect) -> None:
    client = connect()
    client.virtual_host = "nowhere"
    client.start()
    client.log_in()
    client.hear_only(commands.Connection.Tune)
    client.enter()
    text = "NOT_ALLOWED - vhost nowhere not found"
    assert client.told() == [f"connection.close 530 {text} (10, 40)"]


def test_the_least_frame_max(site: Site, connect: Connect) -> None:
    client = connect()
    tuned(client, frame_max=4096 if site.version < (4, 1) else 8192)
    client.hear_only(commands.Connection.OpenOk)


def tuned(client: RawClient, *, frame_max: int = 131_072, channel_max: int = 2047) -> None:
    """Log in and answer connection.tune."""
    client.frame_max = frame_max
    client.start()
    client.log_in()
    client.hear_only(commands.Connection.Tune)
    client.enter(channel_max=channel_max)


def started(client: RawClient, **login: Any) -> None:
    """Log in, and hear no answer yet."""
    client.start()
    client.log_in(**login)


def at_once(client: RawClient, method: Frame) -> None:
    """A method where start-ok is due."""
    client.start()
    client.send(method, 0)


def open_channel_at_once(client: RawClient) -> None:
    """channel.open, where tune-ok is due."""
    started(client)
    client.hear_only(commands.Connection.Tune)
    client.send(commands.Channel.Open(), 1)


REFUSED: list[Callable[[RawClient], None]] = [
    partial(started, response="\0guest\0wrong", capabilities=()),  # it could not be told why
    partial(started, response="guest"),
    partial(started, response="guest\0guest\0guest"),  # RabbitMQ takes no authorization id
    partial(started, mechanism="AMQPLAIN", response="\x05LOG"),
    partial(started, mechanism="NONE", response=""),
    partial(tuned, channel_max=2048),
    partial(tuned, channel_max=0),
    partial(tuned, frame_max=131_073),
    partial(tuned, frame_max=0),
    partial(tuned, frame_max=4095),
    partial(at_once, method=commands.Connection.Open("/")),
    partial(at_once, method=commands.Connection.Close(200, "", 0, 0)),
    open_channel_at_once,
]


def test_what_is_refused_without_a_word(connect: Connect) -> None:
    clients = [connect() for _ in REFUSED]
    for client, say in zip(clients, REFUSED, strict=True):
        say(client)
    # All of them at once: RabbitMQ thinks for three seconds about each.
    assert [client.told() for client in clients] == [[END]] * len(REFUSED)


def test_a_secret_may_be_renewed(connect: Connect) -> None:
    client = connect().opened()
    client.send(commands.Connection.UpdateSecret("guest", "in time"), 0)
    assert client.told() == ["connection.updatesecretok"]
