"""What is left of files when the power fails.

Knows: what a sync promises by POSIX, and no more. A synced file has its bytes, but its name only
once the folder is synced. Of what is not synced, any sectors and any changes of names are there, or
none, in any order; only changes of the same name keep theirs. Must never know: what the files hold.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.power.mounts import Operation

SECTOR: Final = 512


class Disk:
    """What is certainly on the disk, and what may be.

    Args:
        seed: decides what happens to what is not synced.
        syncs_names: whether syncing the folder does so; without, it is a disk for a mutant.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._data: dict[int, bytearray] = {}
        self._names: dict[str, int] = {}
        self._unsynced: dict[int, list[Operation]] = {}
        self._unsynced_names: list[Operation] = []

    @property
    def is_synced(self) -> bool:
        """Whether nothing can be lost now."""
        return not (self._unsynced or self._unsynced_names)

    def do(self, operation: Operation) -> None:
        """Do what was done."""
        match operation.kind:
            case "write" | "truncate":
                self._unsynced.setdefault(operation.file, []).append(operation)
            case "sync":
                self._settle(operation.file, 1.0)
            case "failed sync":  # the pages count as clean: no later sync writes them
                self._settle(operation.file, 0.5)
            case "link" | "unlink" | "rename":
                self._unsynced_names.append(operation)
            case "sync folder":
                for pending in self._unsynced_names:
                    _rename(self._names, pending)
                self._unsynced_names = []

    def left(self, share: float) -> dict[str, bytearray]:
        """The files when the power fails now.

        Args:
            share: how much of what is not synced has reached the disk.
        """
        names, stuck = dict(self._names), set[str]()
        coin = self._coin(share)
        for operation in self._unsynced_names:
            touched = {operation.name, operation.new_name} - {""}
            if touched & stuck or not coin():
                stuck |= touched
            else:
                _rename(names, operation)
        return {name: self._content(file, coin) for name, file in names.items()}

    def fail(self, folder: Path, share: float) -> None:
        """Write down what is left when the power fails now."""
        for name, data in self.left(share).items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o600)

    def _content(self, file: int, coin: Callable[[], bool]) -> bytearray:
        data = bytearray(self._data.get(file, b""))
        for operation in self._unsynced.get(file, ()):
            _apply(data, operation, coin)
        return data

    def _settle(self, file: int, share: float) -> None:
        coin = self._coin(share)
        data = self._data.setdefault(file, bytearray())
        for operation in self._unsynced.pop(file, ()):
            _apply(data, operation, coin)

    def _coin(self, share: float) -> Callable[[], bool]:
        return lambda: self._random.random() < share


def _rename(names: dict[str, int], operation: Operation) -> None:
    if operation.kind != "link":
        names.pop(operation.name, None)
    if operation.kind != "unlink":
        names[operation.new_name or operation.name] = operation.file


def _apply(data: bytearray, operation: Operation, coin: Callable[[], bool]) -> None:
    """Write it, or some sectors of it."""
    if operation.kind == "truncate":
        if coin():
            size = operation.offset
            data[size:] = bytes(max(0, size - len(data)))
        return
    write_torn(data, operation.offset, operation.data, coin)


def write_torn(data: bytearray, offset: int, new: bytes, is_there: Callable[[], bool]) -> None:
    """Write to a file, or to some of its sectors: within one, a disk writes all or nothing."""
    start, end = offset, offset + len(new)
    while start < end:
        stop = min(end, start - start % SECTOR + SECTOR)
        if is_there():
            if len(data) < stop:
                data.extend(bytes(stop - len(data)))
            data[start:stop] = new[start - offset : stop - offset]
        start = stop
