"""Tasks that wait for the relay's thread, without a lock between them: no wake-up is lost."""

import asyncio
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, cast

import pytest

from reliablepub.front.bridge import BURST, Bell, Bridge, Signal, wake
from tests.waiting import until

TIMES = 2_000


def bridge() -> Bridge:
    return Bridge(asyncio.get_running_loop(), lambda: None, lambda: cast("Any", None))


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_change_between_the_first_look_and_the_wait_is_found() -> None:
    async def wait() -> bool:
        relay = bridge()
        bell = Bell(relay)
        looks: list[None] = []

        def is_true() -> bool:
            looks.append(None)
            if len(looks) == 1:  # the change comes just after this look, when no future is there
                bell.ring()
                relay.turned()
                return False
            return True

        return await asyncio.wait_for(bell.until(is_true), 10)

    assert asyncio.run(wait())


def test_a_ring_that_comes_while_the_loop_finishes_its_round_is_served() -> None:
    async def wait() -> bool:
        relay = bridge()
        first, second = Signal(relay), Signal(relay)

        class Rung(deque[Bell]):
            """A queue in which the relay rings once more, just after it was seen empty."""

            def __bool__(self) -> bool:
                was_empty = len(self) == 0
                if was_empty and first.is_set() and not second.is_set():
                    second.set()
                    relay.turned()
                return not was_empty

        relay.rung = Rung()
        tasks = [asyncio.create_task(signal.wait()) for signal in (first, second)]
        await asyncio.sleep(0)
        first.set()
        relay.turned()
        return all(await asyncio.wait_for(asyncio.gather(*tasks), 10))

    assert asyncio.run(wait())


@pytest.mark.usefixtures("frequent_switches")
def test_each_of_many_signals_wakes_its_task() -> None:
    async def wait() -> int:
        relay = bridge()
        signals = [Signal(relay) for _ in range(TIMES)]

        def turns() -> None:
            for signal in signals:
                signal.set()
                relay.turned()

        thread = threading.Thread(target=turns)
        tasks = [asyncio.create_task(signal.wait()) for signal in signals]
        thread.start()
        heard = await asyncio.wait_for(asyncio.gather(*tasks), 30)
        thread.join()
        return sum(heard)

    assert asyncio.run(wait()) == TIMES


@pytest.mark.usefixtures("frequent_switches")
def test_the_end_wakes_tasks_that_wait_and_tasks_that_begin_to() -> None:
    async def wait() -> list[bool]:
        relay = bridge()
        thread = threading.Thread(target=relay.ended, args=(None,))
        tasks = [asyncio.create_task(Signal(relay).wait()) for _ in range(50)]
        await asyncio.sleep(0)  # these wait
        tasks += [asyncio.create_task(Signal(relay).wait()) for _ in range(50)]
        thread.start()
        heard = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        thread.join()
        return heard

    for _ in range(20):
        assert not any(asyncio.run(wait()))


def test_a_task_that_comes_later_is_admitted_later() -> None:
    async def admit() -> list[int]:
        relay, admitted = bridge(), []

        async def publish(number: int) -> None:
            await relay.admission()
            admitted.append(number)

        tasks = [asyncio.create_task(publish(number)) for number in range(BURST + 1)]
        for number in range(BURST + 1, BURST + 31):  # some while the last one above is woken
            await asyncio.sleep(0)
            tasks.append(asyncio.create_task(publish(number)))
        await asyncio.gather(*tasks)
        return admitted

    assert asyncio.run(admit()) == [*range(BURST + 31)]


def test_tasks_that_come_as_the_last_that_queued_are_woken_count_with_them() -> None:
    async def admit() -> int:
        relay, loop = bridge(), asyncio.get_running_loop()
        iteration, admitted = 0, Counter[int]()

        def count() -> None:
            nonlocal iteration
            iteration += 1
            loop.call_soon(count)

        async def publish() -> None:
            await relay.admission()
            admitted[iteration] += 1

        count()
        tasks = [asyncio.create_task(publish()) for _ in range(2 * BURST - 1)]
        for _ in range(2):  # the first run, then the others are woken
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(publish()) for _ in range(BURST)]
        await asyncio.gather(*tasks)
        return max(admitted.values())

    assert asyncio.run(admit()) <= BURST


async def test_a_publisher_that_is_opened_again_and_again_starts_one_timer() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    relay = Bridge(asyncio.get_running_loop(), look, lambda: cast("Any", None))
    relay.started()
    for _ in range(10):
        await relay.until_started()
    relay.ended(None)
    assert looks == 1


@pytest.mark.parametrize("wait", ["signal", "admission"])
def test_a_ctrl_c_in_the_loop_ends_no_other_wait(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_interrupted = False

    def interrupted(future: asyncio.Future[None]) -> None:
        nonlocal is_interrupted
        if not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt
        wake(future)

    monkeypatch.setattr("reliablepub.front.bridge.wake", interrupted)
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[Bridge, list[Signal], list[asyncio.Task[object]]]:
        relay = bridge()
        signals = [Signal(relay) for _ in range(2 * BURST)]
        if wait == "signal":
            return relay, signals, [asyncio.create_task(signal.wait()) for signal in signals]
        return relay, signals, [asyncio.create_task(relay.admission()) for _ in signals]

    relay, signals, tasks = loop.run_until_complete(begin())

    def go_on() -> None:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.1))
        for signal in signals:
            signal.set()
        relay.turned()
        loop.run_until_complete(asyncio.wait(tasks, timeout=10))

    with pytest.raises(KeyboardInterrupt):
        go_on()
    relay.turned()
    _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=5))
    loop.close()
    assert not pending


@pytest.mark.parametrize("name", ["_serve", "_admit", "_wake"])
def test_a_ctrl_c_as_a_callback_begins_ends_no_wait(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks for signals there, before the first line of a function."""
    real, is_interrupted, wakes = getattr(Bridge, name), False, 0

    def interrupted(relay: Bridge, *arguments: Any) -> None:
        nonlocal is_interrupted
        if is_started and not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt
        real(relay, *arguments)

    def woken() -> None:
        nonlocal wakes
        wakes += 1

    is_started = False
    monkeypatch.setattr(Bridge, name, interrupted)
    monkeypatch.setattr("reliablepub.front.bridge._LOOK_S", 0.05)
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[Bridge, Signal, list[asyncio.Task[object]]]:
        relay = Bridge(loop, lambda: None, lambda: cast("Any", None))
        relay.started()
        await relay.until_started()
        signal = Signal(relay)

        async def publish() -> None:
            await relay.admission()
            relay.handed_over(woken)
            await signal.wait()

        return relay, signal, [asyncio.create_task(publish()) for _ in range(2 * BURST + 1)]

    relay, signal, tasks = loop.run_until_complete(begin())
    is_started = True

    def go_on() -> None:
        loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))
        signal.set()
        relay.turned()
        loop.run_until_complete(asyncio.wait(tasks, timeout=10))

    with pytest.raises(KeyboardInterrupt):
        go_on()
    _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=0.2))
    signal.set()
    relay.turned()
    _, pending = loop.run_until_complete(asyncio.wait(tasks, timeout=10))
    wakes = 0
    relay.handed_over(woken)
    loop.run_until_complete(asyncio.sleep(0.01))
    relay.ended(None)
    loop.close()
    assert not pending
    assert wakes == 1


def test_a_ctrl_c_as_a_look_begins_is_not_the_end_of_looking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, looks = Bridge._look, 0

    def interrupted(relay: Bridge) -> None:
        nonlocal looks
        looks += 1
        if looks in {2, 4}:
            raise KeyboardInterrupt
        real(relay)

    monkeypatch.setattr(Bridge, "_look", interrupted)
    monkeypatch.setattr("reliablepub.front.bridge._LOOK_S", 0.02)
    loop = asyncio.new_event_loop()

    async def begin() -> Bridge:
        relay = bridge()
        relay.started()
        await relay.until_started()
        return relay

    relay = loop.run_until_complete(begin())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(10))

    def is_looked_after() -> bool:
        loop.run_until_complete(asyncio.sleep(0.02))
        return looks > 5

    until(is_looked_after)
    relay.ended(None)
    loop.run_until_complete(asyncio.sleep(0.1))
    loop.close()


def test_who_waits_for_the_end_is_looked_after_until_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last look comes just before the relay's thread schedules, and a Ctrl-C follows."""
    real, is_interrupted = Bridge._serve, False

    def interrupted(relay: Bridge) -> None:
        nonlocal is_interrupted
        if relay.is_ended and not is_interrupted:
            is_interrupted = True
            raise KeyboardInterrupt
        real(relay)

    monkeypatch.setattr(Bridge, "_serve", interrupted)
    monkeypatch.setattr("reliablepub.front.bridge._LOOK_S", 0.02)
    loop = asyncio.new_event_loop()

    async def begin() -> tuple[Bridge, asyncio.Task[None]]:
        relay = bridge()
        relay.started()
        await relay.until_started()
        return relay, asyncio.create_task(relay.until_ended())

    relay, task = loop.run_until_complete(begin())
    loop.run_until_complete(asyncio.sleep(0.01))
    relay.is_ended = True  # as `ended` does first; then its thread stands still
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait([task], timeout=10))
    relay._schedule()
    loop.run_until_complete(asyncio.wait([task], timeout=10))
    loop.close()
    assert task.done()


def test_however_long_tasks_queue_no_more_are_admitted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reliablepub.front.bridge._LOOK_S", 0.001)
    admitted, most = 0, 0

    async def publish(relay: Bridge) -> None:
        nonlocal admitted
        for _ in range(40):
            await relay.admission()
            admitted += 1

    async def admit() -> None:
        nonlocal admitted, most
        relay = Bridge(asyncio.get_running_loop(), lambda: None, lambda: cast("Any", None))
        relay.started()
        await relay.until_started()
        tasks = [asyncio.create_task(publish(relay)) for _ in range(10 * BURST)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            most, admitted = max(most, admitted), 0
        relay.ended(None)

    asyncio.run(admit())
    assert most <= BURST
