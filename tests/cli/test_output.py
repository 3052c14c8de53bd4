"""How numbers are written for people, and how files are."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub.cli.commands import Failure
from reliablepub.cli.output import age, count_of, new_file
from reliablepub.printable import one_line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (90_000, "1 d 1 h")],
)
def test_an_age_has_two_units(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_one_is_not_many() -> None:
    assert [count_of(n, "message") for n in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]


def test_a_line_is_a_line() -> None:
    assert one_line("a\r\n\tb  c") == "a b c"


WRITER = """
import signal
import sys
from pathlib import Path
from reliablepub.cli.output import new_file

with new_file(Path(sys.argv[1])) as file:
    file.write(b"a part")
    file.flush()
    signal.raise_signal(int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_part_of_a_file_never_has_its_name(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "all.ndjson"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(int(number))])
    assert writer.wait() == -number
    assert not path.exists()
    part = tmp_path / f"all.ndjson.{writer.pid}.part"
    assert part.read_bytes() == b"a part"
    part.unlink()
    with new_file(path) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_planted_part_is_not_written_to(tmp_path: Path) -> None:
    names = ("new", f"new.{os.getpid()}.part", "theirs")
    path, part, theirs = (tmp_path / name for name in names)
    theirs.touch()
    for plant in (part.symlink_to, part.hardlink_to):
        plant(theirs)
        with new_file(path) as file:
            file.write(b"secret")
        assert theirs.read_bytes() == b""
        assert path.read_bytes() == b"secret"
        path.unlink()


@pytest.fixture(params=[True, False], ids=["with links", "without links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with hard links, and without."""
    if not request.param:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no hard links")))


@pytest.mark.usefixtures("links")
def test_a_file_is_named_when_it_is_whole(tmp_path: Path) -> None:
    with new_file(tmp_path / "new") as file:
        file.write(b"whole")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("new", b"whole")]


@pytest.mark.usefixtures("links")
def test_a_file_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(Failure, match="exists; name a new file"), new_file(path):
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]
