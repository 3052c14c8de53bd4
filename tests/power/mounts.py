"""A mounted file system that writes down what is done to it (`forgetful`), seen from outside.

Knows: its process, its orders, its log. Must never know: FUSE.
"""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pytest


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that was done to the file system.

    Attributes:
        kind: ``write``, ``truncate``, ``sync``, ``failed sync`` of a file; ``link``, ``unlink``,
            ``rename``, ``sync folder`` of the folder; or ``mark``.
        file: number of the file.
        offset: of a write; the new size of a truncation.
        data: of a write.
        name: in the folder, the old one of a renaming; of a mark, what it says.
        new_name: of a renaming.
    """

    kind: str
    file: int = 0
    offset: int = 0
    data: bytes = b""
    name: str = ""
    new_name: str = ""


@dataclass(frozen=True)
class Trouble:
    """What calls shall suffer.

    Attributes:
        calls: names of the calls that count (``write``, ``fsync``, ``create`` ...).
        error: number of the error; 0 for none.
        first: the first call that fails, from 1.
        last: the last one; 0 for no end.
        delay_s: how long each call that counts takes.
        suffix: only files whose name ends like this count.
    """

    calls: tuple[str, ...] = ()
    error: int = 0
    first: int = 1
    last: int = 1
    delay_s: float = 0.0
    suffix: str = ""


CHANGES: Final = ("write", "truncate", "create", "unlink", "rename", "fsync", "fsyncdir")


class Orders:
    """Orders to a mounted file system.

    Args:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mark(self, text: str) -> None:
        """Write down that something has happened outside of the files."""
        os.setxattr(self.folder, "user.mark", text.encode())

    def trouble(self, trouble: Trouble) -> None:
        """Have calls fail or take long from here on."""
        os.setxattr(self.folder, "user.trouble", json.dumps(asdict(trouble)).encode())

    def heal(self) -> None:
        """Nothing fails any more."""
        self.trouble(Trouble())

    @property
    def hits(self) -> int:
        """How many calls have failed or were slow since trouble was ordered."""
        return os.statvfs(self.folder).f_files


@dataclass(frozen=True)
class Mounted:
    """A file system.

    Attributes:
        orders: while it is mounted.
        log: for `operations`, afterwards.
    """

    orders: Orders
    log: Path


def need_mounts() -> None:
    """Skip the test, and say so, where mounting is not permitted; as root nothing is skipped."""
    if os.geteuid():
        pytest.skip("mounting a file system that fails needs root")


@contextmanager
def forgetful(folder: Path, **options: str | bool) -> Iterator[Mounted]:
    """Mount one in a new folder, with options of FUSE; its log is complete when it is unmounted."""
    need_mounts()
    point, log = folder / "disk", folder / "log"
    point.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.power.forgetful", str(point), str(log), json.dumps(options)],
        cwd=Path(__file__).parents[2],
    )
    try:
        while not os.path.ismount(point):
            if server.poll() is not None:
                pytest.fail("no FUSE here: make fuse, and see that there is /dev/fuse")
            time.sleep(0.01)
        yield Mounted(Orders(point), log)
    finally:
        if os.path.ismount(point):
            # Lazily: the kernel may not have let go of a loop device's image yet.
            subprocess.run(["umount", "--lazy", str(point)], check=True)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:  # a file is still open: it ends in order nevertheless
            server.terminate()
            server.wait(20)


def operations(log: Path) -> Iterator[Operation]:
    """Read a log."""
    with log.open("rb") as file:
        unpickler = pickle.Unpickler(file)
        while True:
            try:
                yield unpickler.load()
            except EOFError:
                return
