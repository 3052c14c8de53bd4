"""The first signal asks, the second one interrupts."""

import os
import resource
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from reliablepub.cli.signals import Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_a_flag_and_ends_every_wait(number: signal.Signals) -> None:
    with Stop() as stop:
        assert not stop.wait(0)
        os.kill(os.getpid(), number)
        assert stop.is_set
        assert stop.wait(60)


def test_the_second_interrupts() -> None:
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ends_a_call_that_may_be_ended() -> None:
    with Stop() as stop:
        assert stop.interrupting(lambda: 7) == 7
        assert stop.interrupting(lambda: signal.raise_signal(signal.SIGTERM)) is None
        assert stop.is_set
        assert stop.interrupting(lambda: 7) is None


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Stop():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_signals_do_not_end_it() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not stop.wait(0.01)
            assert not stop.is_set
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_descriptors_above_those_that_select_takes(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(2_048, limits[0]), limits[1]))
        for _ in range(1_100):
            stack.callback(os.close, os.open(tmp_path, os.O_RDONLY))
        with Stop() as stop:
            assert not stop.wait(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.wait(60)
