"""Small file systems that can be filled to the last byte; mounting them needs root.

As root nothing is skipped: where a mount fails, the test does.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from tests.waiting import until

KINDS: Final = ("ext4", pytest.param("tmpfs", marks=pytest.mark.soak))
"""ext4 promises space before it has it, and is what hosts have; in memory all is simpler."""
_MIB: Final = 1024 * 1024


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder where a sync costs nothing: what a failing one means does not depend on the disk."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


@contextmanager
def small_disk(folder: Path, kind: str, mib: int = 16) -> Iterator[Path]:
    """A file system of its own, of a few mebibytes."""
    if os.geteuid():
        pytest.skip("mounting a small file system needs root")
    disk = folder / f"small-{kind}"
    disk.mkdir()
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(disk)]
    else:
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(mib * _MIB)
        mkfs = shutil.which("mkfs.ext4") or "/usr/sbin/mkfs.ext4"
        # Nothing is reserved for root, or the tests would never find the disk full.
        subprocess.run([mkfs, "-q", "-F", "-m", "0", str(image)], check=True)
        mount = ["mount", "-t", "ext4", "-o", "loop", str(image), str(disk)]
    subprocess.run(mount, check=True)
    try:
        yield disk
    finally:
        # Busy while something still reads it, such as a scrape that has just begun.
        until(lambda: subprocess.run(["umount", str(disk)], check=False).returncode == 0)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Fill a disk to the last byte but some; returns the file, which may be cut or removed."""
    filler = disk / "filler"
    spare = disk / "spare"
    if leave:
        with spare.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, leave)
    with filler.open("ab", buffering=0) as file:
        for size in (_MIB, 4096):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
        os.fsync(file.fileno())
    spare.unlink(missing_ok=True)
    return filler


def give_back(filler: Path, size: int) -> None:
    """Free some bytes, as a person would."""
    os.truncate(filler, filler.stat().st_size - size)
    os.sync()
