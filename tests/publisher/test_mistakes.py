"""Natural mistakes of a newcomer: the error says what happened and what to write instead."""

import asyncio
import email.message
import math
import pickle
import socket
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aio_pika
import pytest
from tenacity import stop_after_attempt, wait_fixed

from reliablepub import (
    AsyncPublisher,
    ConfigurationError,
    Exchange,
    GiveUp,
    InvalidMessage,
    Message,
    Outbox,
    OutboxKeys,
    Publisher,
    PublisherClosed,
    Queue,
    Retries,
    RetryPolicy,
    StillOpen,
    Topology,
    provision,
)
from reliablepub.outbox.postgres.enqueue import execute
from reliablepub.relay.handover import Inbox
from reliablepub.testing import FakeBroker
from tests.asking import fill
from tests.between import before
from tests.lazy import Lazy
from tests.waiting import until

AWAY = "amqp://guest:guest@127.0.0.1:1/"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("routingkey", "did you mean 'routing_key'?"),
        ("header", "did you mean 'headers'?"),
        ("queue", "leave out the exchange and give its name as routing_key"),
        ("delivery_mode", "persistent=False"),
        ("mandatory", "it is always on"),
        ("properties", "an argument of its own"),
        ("xyz", "fields are exchange, routing_key"),
    ],
)
def test_a_misspelt_field_names_the_right_one(path: Path, name: str, hint: str) -> None:
    words = f"unexpected keyword argument '{name}': .*{hint.replace('?', '[?]')}"
    with pytest.raises(TypeError, match=words):
        Outbox(path).enqueue(b"x", **{name: "q"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=words):
        Outbox(path).enqueue(Message(b"x"), **{name: "q"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=words):
        Message.json({}, **{name: "q"})  # type: ignore[arg-type]
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with pytest.raises(TypeError, match=words):
            publisher.publish(b"x", **{name: "q"})  # type: ignore[arg-type]
        assert publisher.status.open == 0
    assert not path.exists()


@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
@pytest.mark.parametrize(
    ("name", "hint"),
    [("confirm_timeout", "did you mean confirm_timeout_s"), ("xyz", "see PublisherOptions")],
)
def test_a_misspelt_option_names_the_right_one(door: Any, name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': {hint}"):
        door(AWAY, outbox=None, **{name: 1})


@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
def test_from_env_takes_the_outbox_from_its_variable(door: Any) -> None:
    with pytest.raises(TypeError, match="'outbox': from_env takes it from RELIABLEPUB_OUTBOX"):
        door.from_env(outbox="o.db")


def test_a_connection_is_for_the_other_publisher() -> None:
    problem = "'connection': only the constructor of an AsyncPublisher takes one"
    with pytest.raises(TypeError, match=problem):
        Publisher(AWAY, outbox=None, connection=object())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"a": 1}, r"is dict, not bytes; Message.json\(value"),
        ("text", r"is str, not bytes; encode it"),
        (None, r"is None, not bytes; an empty body is b''"),
        (email.message.Message(), r"is email.message.Message, not bytes or a reliablepub.Message$"),
        (aio_pika.Message(b"x"), r"is aio_pika.message.Message, not bytes or a reliablepub"),
    ],
)
def test_a_body_that_is_not_bytes(path: Path, body: Any, words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        Outbox(path).enqueue(body, routing_key="q")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"close_timeout_s": -1}, "close_timeout_s is -1; it must be a number of seconds, 0 or"),
        ({"close_timeout_s": None}, "close_timeout_s is None"),
        ({"full_timeout_s": -1}, "full_timeout_s is -1"),
        ({"keep_confirmed_s": math.nan}, "keep_confirmed_s is nan"),
        ({"keep_confirmed_s": 10**400}, "keep_confirmed_s is 1000"),
        ({"confirm_timeout_s": "30"}, "confirm_timeout_s is '30'; it must be more than 0"),
        ({"window_max": True}, "window_max is True"),
        ({"window_min": 1.5}, "window_min is 1.5; it must be a whole number"),
        ({"window_max": 1e3}, "window_max is 1000.0; it must be a whole number"),
        ({"window_bytes_max": 1e6}, "window_bytes_max is 1000000.0; it must be a whole number"),
        ({"retry": "forever"}, "retry is of type str, not RetryPolicy"),
        ({"topology": {}}, "topology is of type dict, not Topology"),
        ({"outbox_keys": "k"}, "outbox_keys is of type str, not OutboxKeys"),
        ({"hooks": print}, "hooks is of type builtin_function_or_method; it takes a list"),
    ],
)
@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
def test_an_option_of_the_wrong_kind(door: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        door(AWAY, outbox=None, **options)


@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
def test_certificates_are_given_as_a_context(door: Any) -> None:
    with pytest.raises(ConfigurationError, match="ssl_context is of type str, not SSLContext"):
        door("amqps://localhost/", outbox=None, ssl_context="ca.pem")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (None, "the URL is None; expected amqp://"),
        (b"amqp://h/", "the URL is of type bytes, not str"),
        ([None], "the URL is of type NoneType, not str"),
    ],
)
def test_a_url_that_is_no_text(url: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Publisher(url, outbox=None)


def test_an_outbox_that_is_no_path() -> None:
    words = "given as a path or a URL; this is of type"
    with closing(sqlite3.connect(":memory:")) as connection:
        outboxes: list[Any] = [b"outbox.db", 5, connection]
        for where in outboxes:
            with pytest.raises(ConfigurationError, match=words):
                Outbox(where)
            with pytest.raises(ConfigurationError, match=words):
                Publisher(AWAY, outbox=where)


@pytest.mark.parametrize("timeout_s", ["1", math.nan, True])
def test_a_time_to_wait_that_is_no_number(timeout_s: Any) -> None:
    words = "timeout_s is .*; it must be a number of seconds, or None"
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        receipt = publisher.publish(b"x", routing_key="q")
        calls: list[Callable[[Any], object]] = [receipt.result, publisher.flush, publisher.close]
        for call in calls:
            with pytest.raises(ConfigurationError, match=words):
                call(timeout_s)
        publisher.publish(b"x", routing_key="q")  # it is still open

    async def main() -> None:
        async with AsyncPublisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
            receipt = await publisher.publish(b"x", routing_key="q")
            for call in (receipt.result, publisher.flush, publisher.aclose):
                with pytest.raises(ConfigurationError, match=words):
                    await call(timeout_s)
            await publisher.publish(b"x", routing_key="q")

    asyncio.run(main())


def test_a_deadline_that_has_passed_is_no_wait() -> None:
    """Callers compute the time that is left; it may be negative."""
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        receipt = publisher.publish(b"x", routing_key="q")
        with pytest.raises(StillOpen, match="still open after 0 s"):
            receipt.result(timeout_s=-1)
        assert publisher.close(timeout_s=-1).open == 1
        with pytest.raises(PublisherClosed, match=r"is closed, .*; open a new one"):
            publisher.publish(b"x", routing_key="q")
        with pytest.raises(PublisherClosed, match="stay in the outbox, if there is one"):
            receipt.result()


def test_messages_that_are_none() -> None:
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        words = r"one is of type bytes, not Message; Message\(body, routing_key=...\) makes one"
        with pytest.raises(InvalidMessage, match=words):
            publisher.publish_many([b"x"])  # type: ignore[list-item]


def test_a_lazy_proxy_of_a_message_is_none() -> None:
    """Evaluating it may raise: on the relay's thread, that ends the relay for every caller."""
    lazy: Any = Lazy(Message(b"x", routing_key="q"))
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with pytest.raises(InvalidMessage, match="body: is Lazy, not bytes or"):
            publisher.publish(lazy)
        with pytest.raises(InvalidMessage, match="messages: one is of type Lazy, not Message"):
            publisher.publish_many([lazy])


def test_an_empty_key_would_be_shared_by_all_messages_without_one(path: Path) -> None:
    with pytest.raises(InvalidMessage, match="key: is empty"):
        Outbox(path).enqueue(b"x", routing_key="q", key="")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ("17", "ids is of type str; it takes a list"),
        (17, "ids is of type int; it takes a list"),
        ([{"id": 17}], "id {.id.: 17} is not a number"),
        (["0c7ad4ea"], "id '0c7ad4ea' is not a number; .*`reliablepub outbox retry` takes"),
    ],
)
def test_retry_takes_numbers_of_rows(path: Path, ids: Any, words: str) -> None:
    outbox = Outbox(path)
    outbox.enqueue(b"x", routing_key="q")
    with pytest.raises(ConfigurationError, match=words):
        outbox.retry(ids)


def test_provision_checks_its_arguments_first() -> None:
    with pytest.raises(ConfigurationError, match="topology is of type dict, not Topology"):
        provision(AWAY, {})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="timeout_s is -1; it must be more than 0"):
        provision(AWAY, Topology(), timeout_s=-1)


def test_a_topology_of_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"topology: 'orders' is not Exchange\(...\)"):
        Topology(exchanges=["orders"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"topology: 'q' is not Queue\(...\)"):
        Topology(queues="q")  # type: ignore[arg-type]


def test_a_topology_keeps_what_an_iterator_gave_once() -> None:
    """Else a generator, used up by the check, would leave nothing to declare."""
    exchanges: Any = (Exchange(name) for name in ("a", "b"))
    assert Topology(exchanges).exchanges == (Exchange("a"), Exchange("b"))


class _Asynchronous:
    """A connection as aiosqlite and psycopg have it."""

    cursor = None

    async def __aenter__(self) -> None: ...


def _of(library: str) -> object:
    """A connection of a library that need not be installed."""
    return type("Connection", (), {"__module__": f"{library}.x", "cursor": None})()


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        (b"x", "connection is of type bytes, and .* needs a [^;]*$"),
        (_of("asyncpg"), "of type asyncpg.Connection, .*SessionOutbox.enqueue_async"),
        (_Asynchronous(), "_Asynchronous, .*SessionOutbox.enqueue_async"),
    ],
)
def test_a_connection_that_cannot_be_joined(path: Path, connection: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Outbox(path).enqueue(b"x", routing_key="q", connection=connection)
    with pytest.raises(ConfigurationError, match=words):
        execute(connection, "SELECT 1")


def test_connections_of_sqlalchemy_and_django_have_an_integration(tmp_path: Path) -> None:
    for library, words in (("sqlalchemy.orm", "SessionOutbox"), ("django.db", "DjangoOutbox")):
        with pytest.raises(ConfigurationError, match=words):
            Outbox(tmp_path / "o.db").enqueue(b"x", routing_key="q", connection=_of(library))


async def test_in_an_event_loop_it_warns_once_at_the_line_of_the_caller() -> None:
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with pytest.warns(RuntimeWarning, match="use AsyncPublisher") as warned:
            publisher.publish(b"x", routing_key="q")
        assert warned[0].filename == __file__
        publisher.publish(b"x", routing_key="q")


@pytest.mark.parametrize(
    "publish",
    [
        lambda publisher, message: publisher.publish(message),
        lambda publisher, message: publisher.publish_many([message]),
    ],
)
async def test_a_warning_that_is_made_an_error_comes_before_anything_is_handed_over(
    publish: Callable[[Publisher, Message], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed over may be stored and sent, although its caller got an exception."""
    handed_over: list[object] = []
    before(monkeypatch, Inbox, "put", lambda inbox, chunk: handed_over.append(chunk))
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        with warnings.catch_warnings(action="error"), pytest.raises(RuntimeWarning):
            publish(publisher, Message(b"x", routing_key="q"))
        assert not handed_over
        publisher.publish(b"x", routing_key="q", message_id="second")
        assert publisher.close(0).counters.stored == 1


async def test_in_a_thread_beside_an_event_loop_it_does_not_warn() -> None:
    with Publisher(AWAY, outbox=None, close_timeout_s=0) as publisher:
        await asyncio.to_thread(publisher.publish, b"x", routing_key="q")


def wrong(value: object) -> Any:
    """A value whose type mypy would refuse."""
    return value


ONCE, SOON = stop_after_attempt(1), wait_fixed(1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Retries(ONCE, SOON, then=wrong("park")), "then is 'park'; it takes GiveUp.P"),
        (
            lambda: Retries(ONCE, SOON, then=GiveUp.ARRIVED),
            "it takes GiveUp.PARK or GiveUp.DISCARD",
        ),
        (lambda: RetryPolicy(nacked=wrong(3)), r"nacked is 3; it takes Retries\(stop, wait"),
        (lambda: RetryPolicy(returned=wrong(None)), "returned is None; it takes Retries"),
        (lambda: RetryPolicy(breaker=wrong("on")), "breaker is 'on'; it takes a Breaker or"),
        (lambda: RetryPolicy(decide=wrong("park")), "decide is 'park'; it takes a function"),
        (lambda: OutboxKeys(wrong("x")), "takes a mapping of names to keys, not str"),
        (lambda: OutboxKeys({"a": wrong("x" * 32)}), "names as str, and keys as bytes"),
        (lambda: Queue("q", durable=wrong("yes")), "queue: durable is 'yes', not a bool"),
        (lambda: Queue("q", arguments=wrong([1])), r"queue: arguments is \[1\], not a mapping"),
        (lambda: Outbox("o.db", keys=wrong("k")), "keys is of type str, not OutboxKeys"),
        (lambda: Outbox("o.db", hooks=wrong(print)), "it takes a list of hooks"),
        (lambda: Outbox("o.db", open_bytes_max=wrong("5")), "must be whole numbers, at least 1"),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_is_given(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


class _Awaited:
    """Hooks as a user of asyncio may write them; nothing would ever await them."""

    async def on_parked(self, _events: object) -> None: ...

    async def stamp(self, message: Message) -> Message:
        return message


@pytest.mark.parametrize("door", [Publisher, AsyncPublisher])
def test_a_hook_is_no_coroutine_function(door: Any) -> None:
    words = "_Awaited has async def on_parked and stamp; hooks are called on the relay's thread"
    with pytest.raises(ConfigurationError, match=words):
        door(AWAY, outbox=None, hooks=[_Awaited()])


class _Stamp:
    """A hook that makes another message of each."""

    def __init__(self, make: Callable[[Message], Any]) -> None:
        self.make = make

    def stamp(self, message: Message) -> Any:
        return self.make(message)


@pytest.mark.parametrize("message_id", [None, "of-the-stamp"])
def test_a_stamp_cannot_take_the_id_of_a_receipt_away(
    fake_broker: FakeBroker, path: Path, message_id: str | None
) -> None:
    """A stamp that makes a new message easily forgets the id; consumers would miss it."""
    fake_broker.declare_queue("q")
    stamp = _Stamp(lambda one: Message(one.body, "", "q", message_id=message_id))
    with Publisher(fake_broker.url, outbox=path, hooks=[stamp]) as publisher:
        receipt = publisher.publish(b"x", routing_key="q")
        named = [Message(b"y", routing_key="q", message_id="named")]
        assert publisher.publish_many(named).wait(30).confirmed == 1
        assert publisher.publish_many([Message(b"z", routing_key="q")]).wait(30).confirmed == 1
        assert receipt.result(30).message_id == receipt.message_id
    ids = [one.properties.message_id for one in fake_broker.messages("q")]
    assert ids[:2] == [receipt.message_id, "named"]
    assert ids[2] == message_id or message_id is None


def test_a_stamp_that_returns_nothing_is_named() -> None:
    stamp = _Stamp(lambda _: None)
    words = "_Stamp.*returned NoneType, not a Message"
    with Publisher(AWAY, outbox=None, hooks=[stamp], close_timeout_s=0) as publisher:
        with pytest.raises(TypeError, match=words):
            publisher.publish(b"x", routing_key="q")
        with pytest.raises(TypeError, match=words):
            publisher.publish_many([Message(b"x", routing_key="q")])
        assert publisher.status.open == 0


def test_what_cannot_be_pickled_says_what_can(path: Path) -> None:
    with Publisher(AWAY, outbox=path, close_timeout_s=0) as publisher:
        for one in (publisher, publisher.publish(b"x", routing_key="q")):
            with pytest.raises(TypeError, match=r"cannot be pickled.*or pass an Outbox"):
                pickle.dumps(one)
    with pytest.raises(TypeError, match="OutboxKeys cannot be pickled; make them in each"):
        pickle.dumps(OutboxKeys({"a": bytes(32)}))


def test_a_wait_during_the_first_attempt_names_the_host_that_is_tried(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and never answers
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        with Publisher(f"amqp://guest:guest@{host}/", outbox=path, close_timeout_s=0) as publisher:
            until(lambda: publisher.status.trying)
            with pytest.raises(StillOpen, match=f"; the publisher is connecting to {host}$"):
                publisher.publish(b"x", routing_key="q").result(timeout_s=0.1)


def test_a_process_that_can_have_no_thread_is_told_what_it_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", none)
    for make in (Publisher, opened):
        words = r"the relay has no thread \(can't start new thread\).* run `reliablepub relay`"
        with pytest.raises(ConfigurationError, match=words):
            make("amqp://localhost/", outbox=tmp_path / "o.db")


IN_A_SUB_INTERPRETER = """
from reliablepub import ConfigurationError, Outbox, Publisher
Outbox("o.db").enqueue(b"", routing_key="q")
try:
    Publisher("amqp://localhost/", outbox="o.db")
except ConfigurationError as error:
    print(error)
"""


def test_a_sub_interpreter_can_enqueue_and_is_told_why_it_cannot_relay(
    tmp_path: Path,
) -> None:
    """Such as one of mod_wsgi's."""
    code = f"""
import sys
try:
    from _xxsubinterpreters import create, run_string as run
except ImportError:  # Python 3.13
    from _interpreters import create, exec as run
failed = run(create(), "import sys; sys.path[:] = " + repr(sys.path) + {IN_A_SUB_INTERPRETER!r})
sys.exit(failed and failed.formatted)
"""
    told = subprocess.run(
        [sys.executable, "-Wignore", "-c", code],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "mod_wsgi" in told
    assert "store messages with `Outbox`" in told
    assert Outbox(tmp_path / "o.db").status().open == 1


def opened(url: str, *, outbox: Path) -> None:
    async def main() -> None:
        await AsyncPublisher(url, outbox=outbox).open()

    asyncio.run(main())


def test_after_the_end_of_main_no_publisher_opens(tmp_path: Path) -> None:
    """In Python 3.12.0 and 3.12.1, which then start no thread; in others, the publisher opens."""
    code = (
        "import threading, time\n"
        "from reliablepub import Publisher, ConfigurationError\n"
        "import reliablepub.front.options, reliablepub.transport.pika\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    time.sleep(0.2)\n"
        "    try:\n"
        "        Publisher('amqp://localhost:1/', outbox=None, close_timeout_s=0)\n"
        "        print('opened')\n"
        "    except ConfigurationError as error:\n"
        "        print(error)\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    refuses = (3, 12) <= sys.version_info < (3, 12, 2)
    wanted = "the program is ending" if refuses else "opened"
    assert wanted in done.stdout


def test_uwsgi_without_threads_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for given, warnings_ in (({"enable-threads": True}, 0), ({}, 1)):
        monkeypatch.setitem(sys.modules, "uwsgi", SimpleNamespace(opt=given))
        Publisher("amqp://127.0.0.1:1", outbox=None).close(timeout_s=0)
        assert caplog.text.count("set enable-threads") == warnings_


@pytest.mark.parametrize("part", ["thread", "socket", "select"])
def test_eventlet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    patcher = SimpleNamespace(is_monkey_patched=lambda name: name == part)
    monkeypatch.setitem(sys.modules, "eventlet.patcher", patcher)
    with pytest.raises(ConfigurationError, match="eventlet has replaced those of this process"):
        Publisher("amqp://localhost/", outbox=tmp_path / "o.db")
    fill(tmp_path / "o.db", Message(b"x", routing_key="q"))
