"""`PlainLoad`: numbered messages by plain pika, in the place of `tests.chaos.load.Load`.

Whatever is lost here too was lost by the broker. `control` says whether a node takes messages at
all. It knows pika; it must never know reliablepub's publisher, or faults.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final

import pika
from pika.channel import Channel
from pika.connection import Connection

from reliablepub import Message
from tests.chaos.account import Told
from tests.chaos.load import PIECE, RATE_PER_S, WINDOW_MAX
from tests.waiting import until

_PATIENCE_S: Final = 4.0
"""What a confirm may take, and a connection."""
_CONTROL_S: Final = 15.0
_CONTROLS: Final = 100  # more than a new channel of ours sends at once
ALL_CONFIRMED: Final = "all confirmed"
"""What `control` says of a node that takes messages."""
CONTROL: Final = b"control"
"""The body of what `control` publishes; no confirm of it is awaited."""


def control(url: str, exchange: str, keys: Sequence[str]) -> str:
    """What becomes of some messages with each key at a node, one after the other, in words.

    Not of one: a broker may confirm the first messages of a channel, and none after them.
    """
    said = "no connection"

    def publish() -> None:
        nonlocal said
        with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
            said = "no channel"
            channel = connection.channel()
            channel.confirm_delivery()
            for key in keys:
                said = f"no confirm of {key}"
                for _ in range(_CONTROLS):
                    channel.basic_publish(exchange, key, CONTROL, mandatory=True)
            said = ALL_CONFIRMED

    def attempt() -> None:
        nonlocal said
        try:
            publish()
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            said += f": {error!r}"

    thread = threading.Thread(target=attempt, name="control", daemon=True)  # it may hang
    thread.start()
    thread.join(_CONTROL_S)
    return said


class PlainLoad:
    """A connection after the other, each with a window of messages in flight.

    Args:
        urls: tried one after the other.
        kinds: how many consecutive numbers are of different kinds.
        message_of: makes the message of a number.
        rate_per_s: messages a second.
        is_careful: whether it waits for confirms and looks at returns. If not, it is a mutant that
            takes what was written for confirmed.

    Attributes:
        told: what was confirmed; nothing else was promised.
        acks: for each message told as confirmed: connection, delivery tag, `multiple`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        kinds: int,
        message_of: Callable[[int], Message],
        rate_per_s: float = RATE_PER_S,
        *,
        is_careful: bool = True,
    ) -> None:
        self._urls = itertools.cycle(urls)
        self._kinds = kinds
        self._message_of = message_of
        self._pause_s = PIECE / rate_per_s
        self._is_careful = is_careful
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="plain load")
        self._numbers = itertools.count(1)
        self._again: deque[int] = deque()
        self._in_flight: dict[int, tuple[int, float]] = {}
        self._returned: set[int] = set()
        self._connections = 0
        self.told = Told()
        self.acks: dict[int, tuple[int, int, bool]] = {}
        self.turned_away = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Publish nothing more."""
        self._is_over.set()
        self._thread.join()

    @property
    def counts(self) -> tuple[int, int]:
        """Messages confirmed, twice."""
        return len(self.told.confirmed), len(self.told.confirmed)

    def wait_until_it_flows(self, timeout_s: float) -> float:
        """Wait until messages of each kind are confirmed; the seconds."""
        began, seen = time.monotonic(), set(self.told.confirmed)

        def are_all_confirmed() -> bool:
            new = self.told.confirmed.copy() - seen
            return len({n % self._kinds for n in new}) == self._kinds

        until(are_all_confirmed, timeout_s, every_s=0.1, what="a confirm of each kind")
        return time.monotonic() - began

    # ------------------------------------------------------------------ a connection

    def _run(self) -> None:
        while not self._is_over.is_set():
            parameters = pika.URLParameters(next(self._urls))
            parameters.heartbeat = 2
            parameters.socket_timeout = parameters.stack_timeout = _PATIENCE_S
            self._connections += 1
            connection = pika.SelectConnection(
                parameters,
                on_open_callback=self._open,
                on_open_error_callback=lambda it, _: it.ioloop.stop(),
                on_close_callback=lambda it, _: it.ioloop.stop(),
            )
            connection.ioloop.start()
            self._again += [number for number, _ in self._in_flight.values()]
            self._in_flight.clear()
            self._returned.clear()
            time.sleep(0.1)

    def _open(self, connection: Connection) -> None:
        connection.channel(on_open_callback=self._begin)

    def _begin(self, channel: Channel) -> None:
        self._tag = 0
        if self._is_careful:
            channel.add_on_return_callback(
                lambda _channel, _method, properties, _body: self._returned.add(
                    int(properties.message_id.removeprefix("n"))
                )
            )
            channel.confirm_delivery(self._answered, lambda _: self._publish(channel))
        else:
            self._publish(channel)

    def _publish(self, channel: Channel) -> None:
        """A few messages, and again in a moment, until a confirm takes too long."""
        now = time.monotonic()
        oldest = next(iter(self._in_flight.values()), (0, now))[1]
        if not channel.is_open or self._is_over.is_set() or now - oldest > _PATIENCE_S:
            if channel.connection.is_open:
                channel.connection.close()
            channel.connection.ioloop.call_later(1.0, channel.connection.ioloop.stop)
            return
        for _ in range(PIECE if len(self._in_flight) < WINDOW_MAX else 0):
            number = self._again.popleft() if self._again else next(self._numbers)
            message = self._message_of(number)
            properties = pika.BasicProperties(message_id=message.message_id, delivery_mode=2)
            channel.basic_publish(
                message.exchange, message.routing_key, message.body, properties, self._is_careful
            )
            self._tag += 1
            if self._is_careful:
                self._in_flight[self._tag] = number, now
            else:
                self.told.confirmed.add(number)
        channel.connection.ioloop.call_later(self._pause_s, lambda: self._publish(channel))

    def _answered(self, frame: Any) -> None:
        answer = frame.method
        tags = [answer.delivery_tag]
        if answer.multiple:
            tags = [tag for tag in self._in_flight if tag <= answer.delivery_tag]
        for tag in tags:
            number, _ = self._in_flight.pop(tag)
            if isinstance(answer, pika.spec.Basic.Ack) and number not in self._returned:
                self.told.confirmed.add(number)
                self.acks[number] = self._connections, tag, answer.multiple
            else:
                self._again.append(number)
            self._returned.discard(number)
