"""The first signal asks, the second one interrupts."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from reliablepub import Outbox
from reliablepub.cli.signals import Stop
from tests.cli.conftest import ROOT


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


SITE = """
import atexit
import os
import signal
import sys

class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == os.environ["AT"]:
            # From a text: KeyboardInterrupt that leaves one is remembered when Python ends.
            exec("signal.raise_signal(signal.SIGINT)")

sys.meta_path.insert(0, Finder)
if os.environ["AT"] == "exit":
    atexit.register(signal.raise_signal, signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("at", "code"),
    [
        ("reliablepub.cli", 3),
        ("reliablepub.cli.outbox.changing", 3),
        ("reliablepub.outbox.sqlite.store", 3),
        ("sqlite_utils", 3),
        ("exit", 0),
    ],
)
def test_a_command_can_be_interrupted_from_its_first_import_on(
    tmp_path: Path, at: str, code: int
) -> None:
    Outbox(tmp_path / "o.db").create()
    (tmp_path / "sitecustomize.py").write_text(SITE)
    retry = ("outbox", "retry", "--all", "--dry-run", "--outbox", tmp_path / "o.db")
    ended = subprocess.run(
        [sys.executable, "-m", "reliablepub", *retry],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}", "AT": at},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.strip() == ("Error: interrupted" if code else "")
