"""The publisher under test, on each broker in turn."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Publisher
from reliablepub.testing import FakeBroker, NodeOptions
from reliablepub.transport.pika_hooks import hooks
from tests.conformance.driven import DrivenPublisher, GuestPublisher, LoopThread
from tests.conformance.rig import NARROW, NARROW_CHANNEL_MAX, PASSWORD, FakeRig, RealRig, Rig
from tests.stores import DURABLE, STORES, Where, outbox_of

MAX_MESSAGE_SIZE = 1024 * 1024

FrontDoor = Callable[..., Publisher]
"""Opens a publisher; for asyncio it is a `DrivenPublisher`, which has the same verbs."""


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """The bundled broker, for faults that no real one can be talked into."""
    options = NodeOptions(
        users={"guest": "guest", NARROW: PASSWORD},
        user_channel_max=NARROW_CHANNEL_MAX,
        max_message_size=MAX_MESSAGE_SIZE,
    )
    with FakeBroker(options=options) as broker:
        yield broker


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A broker that the test may harm."""
    if request.param == "fake":
        yield FakeRig(request.getfixturevalue("fake"))
        return
    rig = RealRig(request.getfixturevalue("rabbitmq_node"))
    yield rig
    rig.probe.close()


PUBLIC = "threads, pika's public way"
LENT = "asyncio, the application's connection"
LONG = ("test_one_channel", "test_slow_links", "test_states_of_the_world", "test_survival")
"""Modules whose tests take many seconds each on RabbitMQ."""
SHORT_FORM = {"threads", LENT}
"""Their publishers on RabbitMQ in the short form: both kinds, and both client libraries."""
BEHIND_THE_DOOR = ("test_one_channel", "test_slow_links", "test_states_of_the_world")
"""Modules about what the relay does by itself, the same for `threads` and `asyncio`."""
BESIDE_THE_STORE = ("test_one_channel", "test_slow_links")
"""Modules about connections, which are the same whatever keeps the messages."""


def is_long_form(module: str, door: str, store: str | None, broker: str | None) -> bool:
    """Whether this combination is left to the soak; the short form meets each of the four singly.

    PostgreSQL is behind the relay, where all publishers are alike: one publisher meets it. With
    RabbitMQ it meets it in `test_outcomes`. `rabbitmqctl` takes seconds to change a password.
    """
    if module in BEHIND_THE_DOOR and door == "asyncio":
        return True
    if module == "test_states_of_the_world" and door == PUBLIC:
        return True
    is_real = broker == "real"
    if is_real and (module == "test_credentials" or (module in LONG and door not in SHORT_FORM)):
        return True
    is_alike = door != "threads" or module in BESIDE_THE_STORE
    return store == "postgres" and (is_alike or (is_real and module != "test_outcomes"))


@pytest.hookimpl(tryfirst=True)  # before `-m "not soak"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        is_ours = item.path.parent == Path(__file__).parent  # pytest gives every directory's tests
        if (
            is_ours
            and "front_door" in params
            and is_long_form(
                item.path.stem,
                params["front_door"],
                params.get("outbox", params.get("open_publisher")),
                params.get("rig", params.get("broker")),
            )
        ):
            item.add_marker(pytest.mark.soak)


@pytest.fixture(autouse=True, params=["threads", PUBLIC, "asyncio", LENT])
def front_door(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FrontDoor]:
    """Both front doors, both ways through pika, and aio-pika's: what holds, holds for all.

    The public way is taken by the relay, which is the same behind both doors; once is enough.
    """
    is_hooked = request.param != PUBLIC
    if not is_hooked:
        monkeypatch.setattr(hooks, "_why_off", "a test takes the other way")
    if request.param in {"asyncio", LENT}:
        loop = LoopThread()
        door = GuestPublisher if request.param == LENT else DrivenPublisher
        yield partial(door, loop)  # type: ignore[misc]
        loop.close()
    else:
        yield Publisher


def is_guest(front_door: FrontDoor) -> bool:
    """Whether the publishers of this door are on a connection that the application makes."""
    return isinstance(front_door, partial) and front_door.func is GuestPublisher


@pytest.fixture(params=DURABLE)
def outbox(request: pytest.FixtureRequest, tmp_path: Path) -> Where:
    """Where the outbox of the test is: a file, then a database."""
    where = outbox_of(request.param, request, tmp_path)
    assert where is not None
    return where


@pytest.fixture(params=STORES)
def open_publisher(
    request: pytest.FixtureRequest, tmp_path: Path, front_door: FrontDoor
) -> Iterator[Callable[..., Publisher]]:
    """Opens publishers that are closed at the end: with an outbox of each kind, and without."""
    outbox = outbox_of(request.param, request, tmp_path)
    with ExitStack() as stack:

        def open_(url: str, **options: Any) -> Publisher:
            options.setdefault("close_timeout_s", 0.2)
            return stack.enter_context(front_door(url, outbox=outbox, **options))

        yield open_
