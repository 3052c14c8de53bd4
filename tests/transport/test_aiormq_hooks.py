"""Channels of ours on aiormq's connection, fed by hand: what is written, and whose a number is."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pamqp import commands, frame, header
from yarl import URL

from reliablepub._core.events import Acked, ChannelClosed, ChannelOpened, Event, Nacked, Returned
from reliablepub.transport import aio_pika
from reliablepub.transport.aiormq_hooks import GuestChannel, GuestChannels, problem
from reliablepub.transport.frames import Piece, attempt_number

EPOCH, RUN = 7, 3
QUEUE_MAX = 10


class Host:
    """Of aiormq's connection what the hooks reach for."""

    def __init__(self) -> None:
        self.channels: dict[int, Any] = {}
        self.write_queue: asyncio.Queue[Any] = asyncio.Queue(QUEUE_MAX)
        self.connection_tune = commands.Connection.Tune(channel_max=5, frame_max=4_096)
        self.is_opened = True

    async def ready(self) -> None: ...

    def written(self) -> list[str]:
        """Take what aiormq's writer would write: the channel, and which methods."""
        names = []
        for _ in range(self.write_queue.qsize()):
            finished = self.write_queue.get_nowait()
            data = finished.payload
            if finished.should_drain:
                finished.drain()
            if data.startswith(b"publish"):
                names.append(data.decode())
                continue
            _, number, method = frame.unmarshal(data)
            names.append(f"{number} {method.name}")
        return names

    async def read(self, number: int, *frames: Any) -> None:
        """Do as aiormq's reader does."""
        for one in frames:
            channel = self.channels[number]
            if isinstance(one, commands.Channel.Close | commands.Channel.CloseOk):
                self.channels.pop(number)
            await channel.frames.put((1, one))


class Scene:
    """A connection, our channels on it, and what they told."""

    def __init__(self) -> None:
        self.host = Host()
        self.told: list[Event] = []
        host: Any = self.host
        self.home = GuestChannels(host, run=RUN, tell=self.told.append)

    async def opened(self, epoch: int = EPOCH) -> GuestChannel:
        channel = self.home.open(epoch)
        assert channel is not None
        await asyncio.sleep(0.03)
        await self.host.read(channel.number, commands.Channel.OpenOk(), commands.Confirm.SelectOk())
        assert self.host.written() == [
            f"{channel.number} Channel.Open",
            f"{channel.number} Confirm.Select",
        ]
        assert self.told.pop() == ChannelOpened(epoch)
        return channel


def on_a_loop(test: Callable[[Scene], Any]) -> Callable[[], None]:
    async def main() -> None:
        await test(Scene())

    def runs() -> None:
        asyncio.run(main())

    return runs


@on_a_loop
async def test_a_tag_is_no_negative_number(scene: Scene) -> None:
    channel = await scene.opened()
    for method in (commands.Basic.Ack, commands.Basic.Nack):
        tag = b"\xff" * 7 + b"\xfe"
        data = frame.marshal(method(1), channel.number).replace(bytes(7) + b"\x01", tag)
        _, _, read = frame.unmarshal(data)
        await scene.host.read(channel.number, read)
    assert scene.told == [
        Acked(EPOCH, 2**64 - 2, multiple=False),
        Nacked(EPOCH, 2**64 - 2, multiple=False),
    ]


@on_a_loop
async def test_it_hears_confirms_and_returns(scene: Scene) -> None:
    channel = await scene.opened()
    properties = commands.Basic.Properties(headers={"rp-attempt": attempt_number(RUN, EPOCH, 2)})
    await scene.host.read(
        channel.number,
        commands.Basic.Ack(1),
        commands.Basic.Return(312, "NO_ROUTE", "", "nowhere"),
        header.ContentHeader(body_size=0, properties=properties),
        commands.Basic.Ack(3, multiple=True),
        commands.Basic.Nack(4),
        header.ContentHeader(),  # of nothing
        commands.Channel.Flow(),  # nothing to us
    )
    assert scene.told == [
        Acked(EPOCH, 1, multiple=False),
        Returned(EPOCH, 2, 312, "NO_ROUTE"),
        Acked(EPOCH, 3, multiple=True),
        Nacked(EPOCH, 4, multiple=False),
    ]


@on_a_loop
async def test_after_the_broker_s_close_nothing_is_written_but_close_ok(scene: Scene) -> None:
    channel = await scene.opened()
    channel.publish(1, [Piece(n, b"publish %d" % n) for n in range(8)])
    await scene.host.read(channel.number, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
    channel.publish(1, [Piece(0, b"publish late")])
    channel.close()
    sent_before = [f"publish {n}" for n in range(QUEUE_MAX // 2)]
    assert scene.host.written() == sent_before
    await asyncio.sleep(0.01)
    assert scene.host.written() == [f"{channel.number} Channel.CloseOk"]
    assert scene.told == [ChannelClosed(EPOCH, 404, "NOT_FOUND", by_publish=True)]
    await scene.host.read(channel.number, commands.Basic.Ack(1))
    assert scene.told[1:] == [Acked(EPOCH, 1, multiple=False)], "the core counts what is late"


@on_a_loop
async def test_a_number_is_ours_for_the_next_epoch_until_we_leave(scene: Scene) -> None:
    scene.host.channels[1] = object()  # the application's
    channel = await scene.opened()
    assert channel.number == 2
    await scene.host.read(2, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
    assert scene.host.written() == ["2 Channel.CloseOk"]
    assert set(scene.host.channels) == {1, 2}
    again = await scene.opened(EPOCH + 1)
    assert again.number == 2
    again.close()
    assert scene.host.written() == ["2 Channel.Close"]
    assert not scene.home.is_empty
    await scene.host.read(2, commands.Channel.CloseOk())
    assert scene.home.is_empty
    scene.home.leave()
    assert set(scene.host.channels) == {1}


@on_a_loop
async def test_closes_that_cross_are_both_answered_first(scene: Scene) -> None:
    channel = await scene.opened()
    channel.close()
    await scene.host.read(channel.number, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
    assert scene.host.written() == ["1 Channel.Close", "1 Channel.CloseOk"]
    assert not scene.home.is_empty
    await scene.host.read(channel.number, commands.Channel.CloseOk())
    assert scene.home.is_empty
    assert scene.told == [ChannelClosed(EPOCH, 404, "NOT_FOUND", by_publish=True)], "stale news"


@on_a_loop
async def test_closed_before_it_was_opened(scene: Scene) -> None:
    channel = scene.home.open(EPOCH)
    assert channel is not None
    channel.close()
    await asyncio.sleep(0.03)
    assert scene.host.written() == []
    assert scene.home.is_empty
    late = await scene.opened()
    late.close()
    await scene.host.read(late.number, commands.Channel.OpenOk(), commands.Channel.CloseOk())
    assert scene.host.written() == ["1 Channel.Close"]


@on_a_loop
async def test_no_body_is_in_what_aiormq_logs_of_its_queue(scene: Scene) -> None:
    channel = await scene.opened()
    channel.publish(1, [Piece(0, b"the body")])
    logged = [repr(scene.host.write_queue.get_nowait())]
    while not scene.host.write_queue.empty():
        logged.append(repr(scene.host.write_queue.get_nowait()))
    assert "the body" not in "".join(logged)
    assert logged[-1] == "<8 bytes of reliablepub's>"


@on_a_loop
async def test_half_of_the_write_queue_is_the_application_s(scene: Scene) -> None:
    channel = await scene.opened()
    channel.publish(1, [Piece(n, b"publish %d" % n) for n in range(12)])
    assert scene.host.write_queue.qsize() == QUEUE_MAX // 2
    written = scene.host.written()
    while len(written) < 12:
        await asyncio.sleep(0.002)
        assert scene.host.write_queue.qsize() <= QUEUE_MAX // 2
        written += scene.host.written()
    assert written == [f"publish {n}" for n in range(12)]


@on_a_loop
async def test_a_large_publish_that_was_begun_is_finished_before_our_close(scene: Scene) -> None:
    channel, other = await scene.opened(), await scene.opened(EPOCH + 1)
    parts = [Piece(0, b"publish 0.%d" % n, is_rest=n > 0) for n in range(7)]
    channel.publish(1, [*parts, Piece(1, b"publish 1"), Piece(2, b"publish 2.0")])
    other.publish(1, [Piece(0, b"publish of the other")])
    channel.close()
    written = scene.host.written()
    await asyncio.sleep(0.01)
    assert written + scene.host.written() == [
        *(f"publish 0.{n}" for n in range(7)),
        "publish of the other",
        f"{channel.number} Channel.Close",
    ]


@on_a_loop
async def test_a_large_publish_that_was_begun_is_not_finished_after_the_broker_s_close(
    scene: Scene,
) -> None:
    channel = await scene.opened()
    channel.publish(1, [Piece(0, b"publish 0.%d" % n, is_rest=n > 0) for n in range(7)])
    await scene.host.read(channel.number, commands.Channel.Close(404, "NOT_FOUND", 60, 40))
    written = scene.host.written()
    await asyncio.sleep(0.01)
    assert written + scene.host.written() == [
        *(f"publish 0.{n}" for n in range(5)),
        f"{channel.number} Channel.CloseOk",
    ]


@on_a_loop
async def test_nothing_waits_for_a_connection_that_is_gone(scene: Scene) -> None:
    channel = await scene.opened()
    channel.publish(1, [Piece(n, b"publish %d" % n) for n in range(12)])
    scene.host.written()
    scene.host.is_opened = False
    await asyncio.sleep(0.01)
    scene.host.is_opened = True
    channel.publish(1, [Piece(0, b"publish last")])
    assert scene.host.written() == ["publish last"]


@on_a_loop
async def test_numbers_are_those_the_broker_allows(scene: Scene) -> None:
    scene.host.channels = dict.fromkeys((1, 3, 4, 5))
    home = GuestChannels(scene.host, run=RUN, tell=scene.told.append)  # type: ignore[arg-type]
    channel = home.open(EPOCH)
    assert channel is not None
    assert channel.number == 2
    assert home.open(EPOCH + 1) is None


def test_only_what_was_tested_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    assert problem(host) is None
    del host.write_queue
    assert "differs from the tested one" in str(problem(host))
    monkeypatch.setattr("reliablepub.transport.aiormq_hooks.FOUND_VERSION", "7.2.5")
    assert str(problem(host)).startswith(
        "aiormq is 7.2.5; the tested version is 7.2.4: pip install aiormq==7.2.4"
    )


@pytest.mark.parametrize(
    ("url", "shown"), [("amqp://shop:5673/", "shop:5673"), ("amqp://[::1]:5672/", "[::1]:5672")]
)
def test_a_broker_is_shown_by_host_and_port(url: str, shown: str) -> None:
    connection: Any = SimpleNamespace(url=URL(url))
    assert aio_pika._where(connection) == shown
