"""Confirms that trickle in are taken in together, unless a caller waits for them."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from reliablepub.outbox.patience import Patience
from reliablepub.relay import thread
from reliablepub.relay.thread import RelayThread


class Trickle:
    """A relay and its transport: each look finds so much, while so much is under way."""

    def __init__(self, heard: list[list[str]], *, under_way: int) -> None:
        self._heard = heard
        self._under_way = under_way
        self.waits: list[float | None] = []
        self.taken: list[str] = []

    @property
    def is_unhurried(self) -> bool:
        return self._under_way > len(self.taken)

    def idle_s(self) -> float | None:
        return None

    def listen(self, timeout_s: float | None) -> list[str]:
        self.waits.append(timeout_s)
        return self._heard.pop(0)

    def handle(self, events: Iterable[str]) -> None:
        self.taken += events


@pytest.mark.parametrize(
    ("heard", "under_way", "looks"),
    [
        ([["a"]] * 20, 100, 1 + thread.GATHERINGS),  # so many times more, and no longer
        ([["a"], ["b"], ["c"]], 2, 2),  # until there is a hurry
        ([["a"], ["b"]], 0, 1),
        ([["a"], [], ["c"]], 100, 2),  # until nothing comes
        ([[], ["b"]], 100, 1),  # a caller has ended the wait
    ],
)
def test_it_looks_again_while_there_is_no_hurry(
    monkeypatch: pytest.MonkeyPatch, heard: list[list[str]], under_way: int, looks: int
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    both: Any = Trickle(list(heard), under_way=under_way)
    parts: Any = SimpleNamespace(patience=Patience(""))
    RelayThread(parts)._listen(both, both, 0.5)
    assert both.waits == [0.5] + [0.0] * (looks - 1)
    assert both.taken == [event for events in heard[:looks] for event in events]
    assert slept == [thread.GATHER_S] * (looks - 1)
