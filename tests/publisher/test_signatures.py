"""Options and fields have one home; both publishers take all of them, and nothing else."""

import inspect
from typing import Any, get_type_hints

import pytest

from reliablepub import (
    AsyncPublisher,
    Message,
    MessageFields,
    Publisher,
    PublisherOptions,
    RetryPolicy,
    Topology,
)
from reliablepub.front.options import new_client

AWAY = "amqp://guest:guest@127.0.0.1:1/"


def test_the_options_are_those_that_are_checked() -> None:
    hints = get_type_hints(new_client)
    checked = {
        name: hints[name]
        for name, parameter in inspect.signature(new_client).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
    }
    assert get_type_hints(PublisherOptions) == checked


def test_the_fields_are_those_of_a_message() -> None:
    given = get_type_hints(Message.__init__)
    del given["return"], given["body"]
    assert get_type_hints(MessageFields) == given


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("keep_confirmed_s", "0, the default"),
        ("window_min", "32 by default"),
        ("window_max", "4096 by default"),
        ("window_bytes_max", "16 MiB by default"),
        ("confirm_timeout_s", "30 by default"),
        ("heartbeat_s", "10 by default"),
        ("close_timeout_s", "10 by default"),
    ],
)
def test_the_documented_defaults_are_the_defaults(name: str, text: str) -> None:
    source = inspect.getsource(PublisherOptions)
    assert text in " ".join(source.split(f"    {name}: ")[1].split('"""')[1].split())
    default = inspect.signature(new_client).parameters[name].default
    shown = f"{default >> 20} MiB" if name == "window_bytes_max" else f"{default:g}"
    assert text.startswith(shown)


@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
@pytest.mark.parametrize("name", ["windw_max", "open_store"])
def test_an_unknown_option_is_named(door: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'"):
        door(AWAY, outbox=None, **{name: 1})


def test_a_connection_is_no_option_of_publisher() -> None:
    with pytest.raises(TypeError, match="connection"):
        Publisher(AWAY, outbox=None, connection=object())  # type: ignore[call-arg]


async def test_an_unknown_field_is_named_and_nothing_is_stored() -> None:
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with pytest.raises(TypeError, match="unexpected keyword argument 'exchnge'"):
            publisher.publish(b"x", exchnge="e")  # type: ignore[call-arg]
        assert publisher.status.open == 0
    async with AsyncPublisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with pytest.raises(TypeError, match="unexpected keyword argument 'exchnge'"):
            await publisher.publish(b"x", exchnge="e")  # type: ignore[call-arg]
        assert publisher.status.open == 0


def test_an_id_of_none_is_generated() -> None:
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        assert publisher.publish(b"x", message_id=None).message_id
        assert publisher.publish(b"x", message_id="mine").message_id == "mine"


def test_options_of_every_type_are_taken() -> None:
    options: PublisherOptions = {
        "retry": RetryPolicy(),
        "topology": Topology(),
        "full_timeout_s": 0,
        "close_timeout_s": 0,
    }
    Publisher(AWAY, outbox=None, **options).close()
