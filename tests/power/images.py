"""A real file system on an image that is written down, and on what is left of it.

Knows: mkfs, mount, loop devices. Must never know: outboxes.

The image is a file of `forgetful`, so each write that the file system makes is in its log, and each
flush of its journal is a sync. What is left of the image after a power cut is mounted again, so
that the journal is replayed by the kernel's own code.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.power.mounts import Mounted, Operation, forgetful

KINDS: Final = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4"],
    "xfs": ["mkfs.xfs", "-q", "-f", "--unsupported"],  # as small as that
}
IMAGE: Final = "image"
FOLDER: Final = "data"
BEGIN: Final = Operation("mark", name="begin")
END: Final = Operation("mark", name="end")
"""Between them it is mounted, and ready."""
IMAGE_BYTES: Final = 16 * 1024 * 1024


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, stderr=subprocess.PIPE)


@contextmanager
def mounted(image: Path, point: Path, options: str = "defaults") -> Iterator[Path]:
    """Mount an image; the journal is replayed first."""
    point.mkdir(exist_ok=True)
    _run("mount", "-o", f"loop,{options}", image, point)
    try:
        yield point
    finally:
        _run("umount", point)


@contextmanager
def written_down(
    folder: Path, kind: str, options: str = "defaults"
) -> Iterator[tuple[Mounted, Path]]:
    """A new file system, mounted, whose image is written down from here on."""
    make, *how = KINDS[kind]
    with forgetful(folder) as below:
        image = below.orders.folder / IMAGE
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        folder_fd = os.open(below.orders.folder, os.O_RDONLY)
        os.fsync(folder_fd)
        os.close(folder_fd)
        _run(shutil.which(make) or f"/usr/sbin/{make}", *how, image)
        with mounted(image, folder / kind, options) as point:
            (point / FOLDER).mkdir(mode=0o700)
            _run("sync", "-f", point)
            below.orders.mark(BEGIN.name)
            yield below, point / FOLDER
            below.orders.mark(END.name)
