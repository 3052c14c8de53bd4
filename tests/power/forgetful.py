"""A file system in memory that writes down what is done to it, and fails when told to.

Knows: FUSE (by mfusepy), files, names and syncs; one folder. Must never know: what the files hold,
or what is left of them when the power fails (`disk`).

Programs use it through the kernel: with SQLite's own calls, its locks, its shared memory, and with
another file system on a loop device above an image in it. It runs in a process of its own
(`mounts`), because a program cannot wait for its own file system. Orders are extended attributes of
the folder: the kernel keeps none of them, so each is done before the call returns.
"""

import errno
import json
import os
import pickle
import stat
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Final

import mfusepy

from tests.power.mounts import Operation, Trouble

_BLOCK: Final = 4096
_ROOT: Final = 1
_HIDDEN: Final = "/.fuse_hidden"


class _File:
    def __init__(self, number: int, name: str, mode: int) -> None:
        self.number = number
        self.name = name
        self.mode = mode
        self.owner = (os.geteuid(), os.getegid())
        self.data = bytearray()
        self.times = [time.time_ns()] * 3
        self.links = 1


class Forgetful(mfusepy.Operations):
    """One folder of files; what the kernel asks is answered by name or by number of the file.

    Args:
        log: for the operations.
    """

    use_ns = True

    def __init__(self, log: BinaryIO) -> None:
        self._log = pickle.Pickler(log, protocol=5)
        self._names: dict[str, _File] = {}
        self._files: dict[int, _File] = {}
        self._trouble = Trouble()
        self._count = self._hits = 0

    def _keep(self, operation: Operation) -> None:
        self._log.dump(operation)
        self._log.clear_memo()

    def _suffer(self, call: str, file: _File | None = None) -> None:
        trouble = self._trouble
        if call not in trouble.calls:
            return
        if file is not None and not file.name.endswith(trouble.suffix):
            return
        self._count += 1
        if trouble.delay_s:
            time.sleep(trouble.delay_s)
            self._hits += 1
        if not trouble.error or self._count < trouble.first:
            return
        if not trouble.last or self._count <= trouble.last:
            self._hits += 1
            if call == "fsync" and file is not None:
                self._keep(Operation("failed sync", file.number))
            raise mfusepy.FuseOSError(trouble.error)

    def _named(self, path: str) -> _File:
        try:
            return self._names[path[1:]]
        except KeyError:
            raise mfusepy.FuseOSError(errno.ENOENT) from None

    def _file(self, path: str | None, fh: int | None) -> _File:
        return self._files[fh] if fh else self._named(path or "")

    # ------------------------------------------------------------------ orders

    def setxattr(self, path: str, name: str, value: bytes, options: int, position: int = 0) -> int:
        if name == "user.mark":
            self._keep(Operation("mark", name=value.decode()))
        elif name == "user.trouble":
            told = json.loads(value)
            self._trouble = Trouble(**told | {"calls": tuple(told["calls"])})
            self._count = self._hits = 0
        return 0

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        raise mfusepy.FuseOSError(errno.ENOSYS)  # or the kernel asks at each write

    # ------------------------------------------------------------------ the folder

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        if path == "/":
            owner = {"st_uid": os.geteuid(), "st_gid": os.getegid()}
            return {"st_ino": _ROOT, "st_mode": stat.S_IFDIR | 0o700, "st_nlink": 2, **owner}
        file = self._file(path, fh)
        accessed, modified, changed = file.times
        return {
            "st_ino": file.number,
            "st_mode": stat.S_IFREG | file.mode,
            "st_nlink": file.links,
            "st_uid": file.owner[0],
            "st_gid": file.owner[1],
            "st_size": len(file.data),
            "st_blocks": -(-len(file.data) // 512),
            "st_blksize": _BLOCK,
            "st_atime": accessed,
            "st_mtime": modified,
            "st_ctime": changed,
        }

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self._names]

    def opendir(self, path: str) -> int:
        return 0

    def create(self, path: str, mode: int, fi: object = None) -> int:
        number = 2 + len(self._files)
        file = _File(number, path[1:], stat.S_IMODE(mode))
        self._suffer("create", file)
        self._names[path[1:]] = self._files[number] = file
        self._keep(Operation("link", number, name=path[1:]))
        return number

    def open(self, path: str, flags: int) -> int:
        file = self._named(path)
        self._suffer("open", file)
        return file.number

    def unlink(self, path: str) -> int:
        file = self._named(path)
        self._suffer("unlink", file)
        del self._names[path[1:]]
        file.links = 0
        if not path.startswith(_HIDDEN):
            self._keep(Operation("unlink", file.number, name=path[1:]))
        return 0

    def rename(self, old: str, new: str) -> int:
        file = self._named(old)
        self._suffer("rename", file)
        if new[1:] in self._names:
            self._names[new[1:]].links = 0
        del self._names[old[1:]]
        self._names[new[1:]] = file
        file.name = new[1:]
        if new.startswith(_HIDDEN):  # libfuse deletes an open file so
            self._keep(Operation("unlink", file.number, name=old[1:]))
        else:
            self._keep(Operation("rename", file.number, name=old[1:], new_name=new[1:]))
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._suffer("fsyncdir")
        self._keep(Operation("sync folder"))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        blocks = dict.fromkeys(("f_blocks", "f_bfree", "f_bavail"), 1 << 20)
        sizes = {"f_bsize": _BLOCK, "f_frsize": _BLOCK, "f_namemax": 255}
        return {**sizes, **blocks, "f_files": self._hits}

    def chmod(self, path: str, mode: int) -> int:
        self._named(path).mode = stat.S_IMODE(mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        owner = self._named(path).owner
        self._named(path).owner = (
            owner[0] if uid in (-1, 0xFFFFFFFF) else uid,
            owner[1] if gid in (-1, 0xFFFFFFFF) else gid,
        )
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if path != "/":
            self._named(path).times[:2] = times or (time.time_ns(), time.time_ns())
        return 0

    # ------------------------------------------------------------------ files

    def read(self, path: str | None, size: int, offset: int, fh: int) -> bytes:
        file = self._file(path, fh)
        self._suffer("read", file)
        return bytes(file.data[offset : offset + size])

    def write(self, path: str | None, data: bytes, offset: int, fh: int) -> int:
        file = self._file(path, fh)
        self._suffer("write", file)
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(data)] = data
        file.times[1:] = [time.time_ns()] * 2
        self._keep(Operation("write", file.number, offset, bytes(data)))
        return len(data)

    def truncate(self, path: str | None, length: int, fh: int | None = None) -> int:
        file = self._file(path, fh)
        self._suffer("truncate", file)
        if length < len(file.data):
            del file.data[length:]
        else:
            file.data.extend(bytes(length - len(file.data)))
        self._keep(Operation("truncate", file.number, length))
        return 0

    def fsync(self, path: str | None, datasync: int, fh: int) -> int:
        file = self._file(path, fh)
        self._suffer("fsync", file)
        self._keep(Operation("sync", file.number))
        return 0


if __name__ == "__main__":
    with Path(sys.argv[2]).open("wb") as file:
        mfusepy.FUSE(
            Forgetful(file),
            sys.argv[1],
            foreground=True,
            nothreads=True,
            use_ino=True,
            **json.loads(sys.argv[3]),
        )
