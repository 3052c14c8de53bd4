"""URLs: what they mean, and that a password never comes out again."""

import pickle
from urllib.parse import unquote

import pytest

from reliablepub.errors import ConfigurationError
from reliablepub.transport.address import (
    Address,
    has_password,
    parse_addresses,
    with_password,
)
from reliablepub.transport.base import host_and_port
from reliablepub.transport.pika import connection_parameters

SECRET = "s3cr3t"
GUEST = ("guest", "")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://h", Address("h", 5672, "guest", "", "/", is_tls=False)),
        ("amqp://h/", Address("h", 5672, "guest", "", "/", is_tls=False)),
        ("amqps://h", Address("h", 5671, "guest", "", "/", is_tls=True)),
        ("amqp://h:1234/v", Address("h", 1234, "guest", "", "v", is_tls=False)),
        ("amqp://u:p@h/%2F", Address("h", 5672, "u", "p", "/", is_tls=False)),
        ("amqp://u:p@h/a%2Fb", Address("h", 5672, "u", "p", "a/b", is_tls=False)),
        ("amqp://a%40b:p%3A%2F%40@h", Address("h", 5672, "a@b", "p:/@", "/", is_tls=False)),
        ("amqp://u:@h", Address("h", 5672, "u", "", "/", is_tls=False)),
        ("amqp://u@h", Address("h", 5672, "u", "", "/", is_tls=False)),
        ("amqp://[::1]:99/v", Address("::1", 99, "guest", "guest", "v", is_tls=False)),
        ("amqp://[fe80::1%25eth0]", Address("fe80::1%eth0", 5672, *GUEST, "/", is_tls=False)),
        ("amqp://[fe80::1%eth0]", Address("fe80::1%eth0", 5672, *GUEST, "/", is_tls=False)),
        ("amqp://[fe80::1%25]", Address("fe80::1%25", 5672, *GUEST, "/", is_tls=False)),
        ("amqp://h/%C3%BC", Address("h", 5672, "guest", "", "ü", is_tls=False)),
        (" amqp://h/ ", Address("h", 5672, "guest", "", "/", is_tls=False)),
        ("amqp://h.", Address("h.", 5672, "guest", "", "/", is_tls=False)),
        ("amqp://bücher.example", Address("bücher.example", 5672, "guest", "", "/", is_tls=False)),
        ("AMQP://Host", Address("host", 5672, "guest", "", "/", is_tls=False)),
    ],
)
def test_a_url_names_a_broker(url: str, expected: Address) -> None:
    assert parse_addresses(url) == (expected,)


def test_a_certificate_names_no_zone() -> None:
    (address,) = parse_addresses("amqps://[fe80::1%25lo]")
    options = connection_parameters(address, timeout_s=1).ssl_options
    assert options is not None
    assert options.server_hostname == "fe80::1"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "scheme"),
        ("localhost:5672", "scheme"),
        (f"http://u:{SECRET}@h", "scheme"),
        (f"amqp://u:{SECRET}@", "names no host"),
        (f"amqp://u:{SECRET}@:5672", "names no host"),
        (f"amqp://u:{SECRET}@h:port", "cannot be read"),
        (f"amqp://u:{SECRET}@h:70000", "cannot be read"),
        (f"amqp://u:{SECRET}@[::1", "cannot be read"),
        (f"amqp://u:{SECRET}@h/a/b", "%2F"),
        (f"amqps://u:{SECRET}@h?no_verify_ssl=1", "query"),
        (f"amqp://u:{SECRET}@h#x", "fragment"),
        (f"amqp://u:{SECRET}@h/{'v' * 256}", "255"),
        (f"amqp://u:{SECRET}/@h", "write / in a password as %2F"),
        (f"amqp://u:/{SECRET}@h", "write / in a password as %2F"),
        (f"amqp://u:12/{SECRET}@h", "write / in a password as %2F"),
        (f"amqp://u:/{SECRET}@a,b/v", "write / in a password as %2F"),
        (f"amqp://u:{SECRET}@a,,b", "names no host"),
        (f"amqp://u:{SECRET}@a..b/", "no host name"),
        (f"amqp://u:{SECRET}@.a/", "no host name"),
        (f"amqp://u:{SECRET}@{'a' * 64}.example/", "no host name"),
        (f"amqp://u:{SECRET}@{'ü' * 60}/", "no host name"),
        (f"amqp://u:{SECRET}@\ue000/", "no host name"),
        (f"amqp://u:{SECRET}@a\0b/", "no host name"),
        (f"amqps://u:{SECRET}@a,b..c", "no host name"),
        (f"amqp://u:{SECRET}\udce4@h", "cannot be encoded as UTF-8"),
        (f"amqp://u:{SECRET}@h/\udcff", "cannot be encoded as UTF-8"),
        (f"amqp://u:{SECRET}@h:0", "from 1 to 65535"),
        (f"amqp://u:{SECRET}@h:5672vhost", "the vhost comes after a /"),
        (f"http://u:{SECRET}@h:15672/", "management interface"),
        (f"amqp://u:{SECRET}@a/,amqp://u:{SECRET}@b/", "give several as a list"),
        (f"amqp://u:{SECRET}@a/;amqp://u:{SECRET}@b/", "give several as a list"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(url: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as raised:
        parse_addresses(url)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    "password", [SECRET, f"/{SECRET}", f"12/{SECRET}", f"#{SECRET}", f"?{SECRET}"]
)
def test_a_password_is_recognized_however_it_is_written(password: str) -> None:
    assert has_password(f"amqp://u:{password}@h/v")


@pytest.mark.parametrize("url", ["amqp://u@h/a%40b", "amqp://h/v", "/data/a@b.db", "a@b.db"])
def test_what_has_no_password_is_not_taken_for_one(url: str) -> None:
    assert not has_password(url)


def test_several_urls_are_several_brokers() -> None:
    addresses = parse_addresses(["amqps://a", "amqps://b"])
    assert [(one.host, one.is_tls) for one in addresses] == [("a", True), ("b", True)]


@pytest.mark.parametrize("password", ["p", "p,w", "%2C%40"])
def test_one_url_may_name_several_hosts(password: str) -> None:
    addresses = parse_addresses(f"amqp://u:{password}@a,b:5673,[::1]:99/v")
    assert [(one.host, one.port) for one in addresses] == [("a", 5672), ("b", 5673), ("::1", 99)]
    assert {(one.user, one.password, one.vhost) for one in addresses} == {
        ("u", unquote(password), "v")
    }
    with_its_password = with_password("amqp://u@a,b:5673/v", "s,@/")
    assert [one.password for one in parse_addresses(with_its_password)] == ["s,@/"] * 2


def test_no_url_at_all_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no URL"):
        parse_addresses([])


def test_the_password_is_in_no_text() -> None:
    (address,) = parse_addresses(f"amqp://user:{SECRET}@h/v")
    assert SECRET not in f"{address} {address!r}"
    assert str(address) == "amqp://h:5672/v"
    assert pickle.loads(pickle.dumps(address)).password == SECRET


@pytest.mark.parametrize(
    ("host", "shown"),
    [("h", "h:5672"), ("127.0.0.1", "127.0.0.1:5672"), ("fe80::1%eth0", "[fe80::1%eth0]:5672")],
)
def test_a_port_is_told_from_an_address(host: str, shown: str) -> None:
    assert host_and_port(host, 5672) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://u@h/v", "amqp://h:5672/v"),
        ("amqp://h", "amqp://h:5672"),
        ("amqps://h/", "amqps://h:5671"),
        ("amqp://h/%2F", "amqp://h:5672"),
        ("amqp://h/a%2Fb%20c", "amqp://h:5672/a%2Fb%20c"),
        ("amqp://[::1]:5673/v", "amqp://[::1]:5673/v"),
    ],
)
def test_a_printed_address_can_be_pasted(url: str, shown: str) -> None:
    (address,) = parse_addresses(url)
    assert str(address) == shown
    (again,) = parse_addresses(shown)
    assert (again.host, again.port, again.vhost) == (address.host, address.port, address.vhost)
