"""A file with a second name is refused: each name would have a write-ahead log of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reliablepub import Outbox
from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.sqlite.mounts import _escaped
from tests.asking import fill
from tests.surroundings.app import DOORS, App, Ended


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "outbox.db"
    fill(path, Message(b"", message_id="before"))
    return path


@pytest.mark.parametrize("name", ["outbox.db", "link.db"])
@pytest.mark.parametrize("door", DOORS)
def test_a_hard_link_is_refused_by_either_name(path: Path, door: str, name: str) -> None:
    os.link(path, path.with_name("link.db"))
    refuses_all(door, path.with_name(name))


def test_a_hard_link_names_the_command_that_finds_the_other(path: Path) -> None:
    os.link(path, path.with_name("link.db"))
    words = rf"has 2 names \(hard links\).* \(find / -samefile {path}\)"
    with pytest.raises(OutboxError, match=words), Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
    path.with_name("link.db").unlink()
    fill(path, Message(b""))


@pytest.mark.parametrize("door", DOORS)
def test_a_file_that_is_mounted_by_itself_is_refused(
    tmp_path: Path, path: Path, door: str, in_namespace: Callable[[str], None]
) -> None:
    """As ``docker run -v app.db:/data/my app.db`` does."""
    inside = tmp_path / "my app.db"
    inside.touch()
    in_namespace(
        f"mount --bind '{path}' '{inside}'\n"
        f"'{sys.executable}' -m tests.surroundings.test_names {door} '{inside}'"
    )


@pytest.mark.parametrize("folder", ["link", "real/../real"])
def test_a_file_that_is_mounted_by_itself_is_refused_by_any_name_of_its_folder(
    tmp_path: Path, path: Path, folder: str, in_namespace: Callable[[str], None]
) -> None:
    inside = tmp_path / "real" / "app.db"
    inside.parent.mkdir()
    inside.touch()
    (tmp_path / "link").symlink_to("real")
    in_namespace(
        f"mount --bind '{path}' '{inside}'\n"
        f"'{sys.executable}' -m tests.surroundings.test_names within "
        f"'{tmp_path}/{folder}/app.db'"
    )


@pytest.fixture
def in_namespace() -> Callable[[str], None]:
    """Run a script in a mount namespace of its own, as root of a user namespace if need be."""

    def run(script: str) -> None:
        unshare = ["unshare", "--mount"] + ["--map-root-user"] * (os.geteuid() != 0)
        subprocess.run([*unshare, "bash", "-euc", script], check=True, timeout=60)

    return run


def test_a_name_is_looked_for_as_a_list_of_mounts_escapes_it() -> None:
    assert _escaped(b"/a b\tc\nd\\e") == rb"/a\040b\011c\012d\134e"
    assert _escaped(rb"/a\040") == rb"/a\134040"


def refuses_all(door: str, path: Path) -> None:
    """No message gets in by this door: the application raises when it opens it, or each time."""
    with App(door, path) as app:
        try:
            told = app.round()
        except Ended as error:
            assert "reliablepub.OutboxError: outbox" in str(error)  # noqa: PT017 - either way
            return
        assert set(told.raised.values()) == {"OutboxError"}, told


if __name__ == "__main__":
    refuses_all(sys.argv[1], Path(sys.argv[2]))
