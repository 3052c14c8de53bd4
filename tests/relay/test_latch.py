"""What every publish waits for."""

import threading

from reliablepub.relay.handover import Latch


def test_it_is_set_once_and_stays_so() -> None:
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0.01)
    latch.set()
    latch.set()
    assert latch.is_set()
    assert latch.wait(0)
    assert latch.wait(0)


def test_it_wakes_the_waiting_thread() -> None:
    latch = Latch()
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(latch.wait(threading.TIMEOUT_MAX)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    latch.set()
    for thread in threads:
        thread.join(30)
    assert woken == [True, True, True]
