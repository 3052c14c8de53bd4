"""What is asked of a file at a path: its identity and its length, and not its times."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub.outbox.sqlite import location
from reliablepub.outbox.sqlite.location import libc, look


@pytest.fixture(params=["statx", "statx is forbidden", "no statx"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "statx is forbidden":
        monkeypatch.setattr(libc(), "statx", lambda *_: -1)
    elif request.param == "no statx":
        monkeypatch.setattr(location, "libc", lambda: None)
    location._statx.cache_clear()
    yield
    location._statx.cache_clear()


@pytest.mark.usefixtures("_kernel")
def test_a_file_has_an_identity_and_a_length(tmp_path: Path) -> None:
    file = tmp_path / "a \N{SNOWMAN}"
    file.write_bytes(b"12345")
    told = file.stat()
    assert look(os.fsencode(file)) == ((told.st_dev, told.st_ino), 5)


def test_times_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bytes] = []
    monkeypatch.setattr(os, "lstat", looks.append)
    assert look(os.fsencode(tmp_path))[0] is not None
    assert looks == []


@pytest.mark.usefixtures("_kernel")
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to("file")
    told = link.lstat()
    assert look(os.fsencode(link)) == ((told.st_dev, told.st_ino), len("file"))


@pytest.mark.usefixtures("_kernel")
def test_another_device_is_told() -> None:
    told = Path("/proc/self").parent.stat()
    assert look(b"/proc")[0] == (told.st_dev, told.st_ino)


def test_a_system_without_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _name: object())
    assert libc.__wrapped__() is None


def test_a_system_without_statx_has_a_bell_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        inotify_init1, inotify_add_watch = Mock(), Mock()

    monkeypatch.setattr("ctypes.CDLL", lambda _name: Old())
    assert isinstance(libc.__wrapped__(), Old)


@pytest.mark.usefixtures("_kernel")
def test_what_is_missing_has_neither(tmp_path: Path) -> None:
    assert look(os.fsencode(tmp_path / "missing")) == (None, 0)
