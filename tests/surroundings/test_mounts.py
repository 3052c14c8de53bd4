"""What a directory is mounted with decides whether it can hold an outbox."""

import json
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from reliablepub import Outbox
from reliablepub.cli.app import main
from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.sqlite import mounts
from reliablepub.outbox.sqlite.mounts import UNSHARED_VARIABLE, Mount, forgets, mount_of
from tests.asking import fill
from tests.power.mounts import forgetful
from tests.surroundings.app import DOORS
from tests.surroundings.test_names import refuses_all


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory that is mounted as from another machine."""
    with forgetful(tmp_path, subtype="sshfs") as mounted:
        yield mounted.orders.folder


@pytest.fixture
def vouched(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(UNSHARED_VARIABLE, f"/elsewhere:{shared}")
    return shared


@pytest.mark.parametrize("door", DOORS)
def test_a_mount_that_other_machines_use_is_refused(shared: Path, door: str) -> None:
    refuses_all(door, shared / "outbox.db")
    assert not list(shared.glob("outbox.db*")) or door.startswith("within"), "whose file it is"


def test_the_error_names_the_mount_and_the_way_out(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(shared)
    words = rf"it is on {shared}, which is mounted with fuse.sshfs .* {UNSHARED_VARIABLE}={shared}"
    for folder in (shared, tmp_path / "link"):
        with pytest.raises(OutboxError, match=words), Outbox(folder / "o.db") as outbox:
            outbox.enqueue(Message(b""))


def test_nor_is_it_looked_at(vouched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = vouched / "o.db"
    with Outbox(path) as outbox:
        outbox.create()
    before = sorted(vouched.iterdir())
    monkeypatch.delenv(UNSHARED_VARIABLE)
    for command in ("outbox status", "outbox list", "outbox check", "doctor"):
        result = CliRunner().invoke(main, [*command.split(), "--outbox", str(path)])
        assert result.exit_code
        assert "is mounted with fuse.sshfs" in result.output
    assert sorted(vouched.iterdir()) == before


def test_who_knows_better_can_say_so(vouched: Path) -> None:
    fill(vouched / "o.db", Message(b""))
    assert _mount_told(vouched / "o.db") == (
        "ok",
        f"fuse.sshfs, mounted at {vouched}, which {UNSHARED_VARIABLE} says no other machine uses",
    )


def _mount_told(path: Path) -> tuple[str, str]:
    told = CliRunner().invoke(main, ["doctor", "--outbox", str(path), "--json"]).stdout
    [found] = [one for one in json.loads(told) if one["check"] == "mount"]
    return found["level"], found["found"]


@pytest.mark.parametrize(
    "kind",
    ["9p", "cifs", "fakeowner", "fuse.grpcfuse", "fuse.JuiceFS", "nfs4", "vboxsf", "virtiofs"],
)
def test_kinds_that_two_machines_can_use(kind: str) -> None:
    assert Mount(kind, "/").is_shared


@pytest.mark.parametrize("kind", ["btrfs", "ext4", "fuse", "fuseblk", "overlay", "xfs", "zfs"])
def test_kinds_of_one_machine(kind: str) -> None:
    assert not Mount(kind, "/").is_shared


def test_a_mount_without_shared_memory_is_told_as_such(tmp_path: Path) -> None:
    with forgetful(tmp_path, direct_io=True) as mounted:
        path = mounted.orders.folder / "o.db"
        with pytest.raises(OutboxError, match="file system without shared memory"):
            Outbox(path).enqueue(Message(b""))


IN_MEMORY = """
import logging, sys
from pathlib import Path
from reliablepub import Outbox
logging.basicConfig(format="%(event)s: %(message)s")
for n in range(2):
    with Outbox(sys.argv[1]) as outbox:
        outbox.enqueue(b"")
"""


def test_memory_is_warned_of_once(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    unshare = ["unshare", "--mount"] + ["--map-root-user"] * (os.geteuid() != 0)
    script = (
        'mount -t tmpfs -o mode=700 none "$1"; "$2" -c "$3" "$1/o.db" 2>&1; '
        '"$2" -m reliablepub doctor --outbox "$1/o.db" || true'
    )
    command = [*unshare, "bash", "-euc", script, "-", str(folder), sys.executable, IN_MEMORY]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert told.count(f"in_memory: {folder} is in memory (tmpfs, mounted at {folder})") == 1
    assert "restart of the machine loses the messages" in " ".join(told.split())


def test_the_last_of_two_mounts_counts(tmp_path: Path) -> None:
    script = (
        'mount -t tmpfs none "$1"; mkdir "$1/in"; mount -t ramfs none "$1/in"; '
        'mount -t tmpfs none "$1"; mkdir "$1/in"; "$2" -c "$3" "$1/in"'
    )
    code = (
        "import sys; from pathlib import Path; "
        "from reliablepub.outbox.sqlite.mounts import mount_of; print(*mount_of(Path(sys.argv[1])))"
    )
    unshare = ["unshare", "--mount"] + ["--map-root-user"] * (os.geteuid() != 0)
    command = [*unshare, "bash", "-euc", script, "-", str(tmp_path), sys.executable, code]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert told == f"tmpfs {tmp_path}\n"


def test_a_system_without_a_list_of_mounts_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount_of(tmp_path / "missing") is None
    monkeypatch.setattr(mounts, "_read", lambda _: b"")
    assert mount_of(tmp_path) is None
    assert forgets(tmp_path) == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert mount_of(tmp_path) is None


def test_on_a_mac_the_drives_cache_is_emptied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "o.db"
    with Outbox(path) as outbox:
        outbox.create()
        with outbox._database._writer as connection:  # type: ignore[attr-defined]
            for pragma in ("fullfsync", "checkpoint_fullfsync"):
                assert connection.execute(f"PRAGMA {pragma}").fetchone() == (1,)
    monkeypatch.setattr(sys, "platform", "darwin")
    caplog.set_level(logging.WARNING, "reliablepub.outbox")
    for setting, warnings in (("OFF", 1), ("ON", 0)):
        caplog.clear()
        with Outbox(path) as outbox, closing(sqlite3.connect(path)) as app, app:
            app.execute(f"PRAGMA fullfsync = {setting}")
            outbox.enqueue(Message(b""), connection=app)
        assert sum("fullfsync = OFF" in text for text in caplog.messages) == warnings
