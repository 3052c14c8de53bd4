"""The publisher under test, on each broker in turn."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Publisher
from reliablepub.testing import FakeBroker, NodeOptions
from tests.conformance.rig import FakeRig, RealRig, Rig

MAX_MESSAGE_SIZE = 1024 * 1024


@pytest.fixture
def fake() -> Iterator[FakeBroker]:
    """The bundled broker, for faults that no real one can be talked into."""
    with FakeBroker(options=NodeOptions(max_message_size=MAX_MESSAGE_SIZE)) as broker:
        yield broker


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.rabbit)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A broker that the test may harm."""
    if request.param == "fake":
        yield FakeRig(request.getfixturevalue("fake"))
        return
    rig = RealRig(request.getfixturevalue("rabbitmq_node"))
    yield rig
    rig.unblock()
    rig.probe.close()


@pytest.fixture(autouse=True, params=["hooked", "public"])
def way_through_pika(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way through pika, and its public one: what holds, holds on both."""
    monkeypatch.setattr("reliablepub.transport.pika.IS_HOOKED", request.param == "hooked")


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    """Where the outbox of the test is."""
    return tmp_path / "outbox.db"


@pytest.fixture(params=["durable", "in memory"])
def open_publisher(
    request: pytest.FixtureRequest, outbox: Path
) -> Iterator[Callable[..., Publisher]]:
    """Opens publishers that are closed at the end: with an outbox, and without."""
    with ExitStack() as stack:

        def open_(url: str, **options: Any) -> Publisher:
            path = outbox if request.param == "durable" else None
            options.setdefault("close_timeout_s", 0.2)
            return stack.enter_context(Publisher(url, outbox=path, **options))

        yield open_
