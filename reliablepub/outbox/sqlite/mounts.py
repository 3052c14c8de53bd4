"""Tells by its mount whether a directory can hold an outbox.

Knows: the kinds of file systems. Must never know: what is in a file.

SQLite's locks and the shared memory of its log reach the processes of one kernel. On a directory
that another kernel uses too (a network file system, or a directory of the host in a virtual
machine, as with Docker Desktop), each side overwrites what the other has committed, and neither
gets an error.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final, NamedTuple

from reliablepub.errors import OutboxError

UNSHARED_VARIABLE: Final = "RELIABLEPUB_UNSHARED_MOUNTS"
"""Names mount points, separated by colons, that no other kernel uses, whatever their kind."""
# fmt: off
_SHARED: Final = {
    # hosts lend directories to virtual machines
    "9p", "drvfs", "fakeowner", "grpcfuse", "osxfs", "prl_fs", "vboxsf", "virtiofs", "vmhgfs",
    "vmhgfs-fuse",
    # networks and clusters
    "acfs", "afs", "beegfs", "ceph", "ceph-fuse", "cifs", "coda", "curlftpfs", "davfs", "gfs2",
    "glusterfs", "gpfs", "lustre", "moosefs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
    "pvfs2", "smb3", "smbfs", "smbnetfs", "sshfs",
    # object stores
    "blobfuse", "blobfuse2", "gcsfuse", "goofys", "juicefs", "mountpoint-s3", "rclone", "s3fs",
    "seaweedfs",
}
# fmt: on
_IN_MEMORY: Final = ("ramfs", "tmpfs")


class Mount(NamedTuple):
    """The mount that a directory is on."""

    kind: str  # of file system, such as ``ext4`` or ``fuse.sshfs``
    point: str

    @property
    def is_shared(self) -> bool:
        """Whether another kernel can use it at the same time."""
        return self.kind.removeprefix("fuse.").lower() in _SHARED

    @property
    def is_in_memory(self) -> bool:
        """Whether it ends with the machine, whatever is synced."""
        return self.kind in _IN_MEMORY

    @property
    def is_vouched_for(self) -> bool:
        """Whether the environment says that no other kernel uses it."""
        return self.point in os.environ.get(UNSHARED_VARIABLE, "").split(":")


def mount_of(folder: Path) -> Mount | None:
    """Return the mount of a directory; None if that cannot be told, as without ``/proc``."""
    if sys.platform != "linux":
        return None
    try:
        fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        number = re.search(rb"^mnt_id:\t(\d+)", _read(f"/proc/self/fdinfo/{fd}"), re.MULTILINE)
    finally:
        os.close(fd)
    # The fields are those of proc(5); before the dash there can be any number of them.
    line = rb"^%b \S+ \S+ \S+ (\S+) .*? - (\S+)" % (number[1] if number else b"-")
    found = re.search(line, _read("/proc/self/mountinfo"), re.MULTILINE)
    if found is None:
        return None
    point, kind = (os.fsdecode(_unescaped(name)) for name in found.groups())
    return Mount(kind, point)


def refuse_shared(path: Path) -> None:
    """Refuse a directory that another kernel can use, unless the environment vouches for it."""
    mount = mount_of(path.parent)
    if mount is not None and mount.is_shared and not mount.is_vouched_for:
        raise OutboxError(
            f"outbox {path} was not opened: it is on {mount.point}, which is mounted with "
            f"{mount.kind} and so may be used by two machines at once, where SQLite loses messages "
            "without an error; use a disk of this machine (a container's own disk or a named "
            "volume) or PostgreSQL. If no other machine, the host included, uses the outbox, set "
            f"{UNSHARED_VARIABLE}={mount.point}"
        )


def forgets(folder: Path) -> str:
    """Say that a directory is in memory, and what to do; empty if it is not."""
    mount = mount_of(folder)
    if mount is None or not mount.is_in_memory:
        return ""
    return (
        f"{folder} is in memory ({mount.kind}, mounted at {mount.point}): when the machine "
        "restarts, the messages there are lost; keep an outbox on a disk"
    )


def is_mount_point(path: Path) -> bool:
    """Whether a file is mounted by itself: whether it is in the list of mounts."""
    name = _escaped(os.fsencode(path.parent.resolve() / path.name))  # the list has real names
    listed = _read("/proc/self/mountinfo")
    # A host of containers has hundreds of lines, and each connection of an application's comes
    # here: only a list that has the path somewhere is taken apart.
    line = rb"^\S+ \S+ \S+ \S+ %b " % re.escape(name)
    return b" %b " % name in listed and bool(re.search(line, listed, re.MULTILINE))


def _read(name: str) -> bytes:
    """Read a file of ``/proc``; empty if there is none, as in some sandboxes."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(fd, 65_536), b""))
    finally:
        os.close(fd)


def _escaped(name: bytes) -> bytes:
    """Write space, tab, newline and backslash as octal escapes, as proc(5) does."""
    return re.sub(rb"[ \t\n\\]", lambda byte: b"\\%03o" % ord(byte[0]), name)


def _unescaped(name: bytes) -> bytes:
    return re.sub(rb"\\(\d{3})", lambda digits: bytes([int(digits[1], 8)]), name)
