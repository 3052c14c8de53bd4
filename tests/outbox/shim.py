"""A file system under SQLite that fails when told to, and remembers what was written and synced.

Knows: SQLite's VFS interface (sqlite3.h: `sqlite3_vfs`, `sqlite3_io_methods`), by ctypes on the
very library that `sqlite3` uses. Must never know: what the product does with its files.

The system's own VFS does the work: its table of functions is copied, and some entries lead through
here. So what is tested is the real thing, with its locks and its shared memory.
"""

import _sqlite3
import ctypes
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any, Final

OK: Final = 0
BUSY: Final = 5
READONLY: Final = 8
CORRUPT: Final = 11
FULL: Final = 13
CANTOPEN: Final = 14
IOERR_READ: Final = 10 | (1 << 8)
IOERR_WRITE: Final = 10 | (3 << 8)
IOERR_SHMMAP: Final = 10 | (21 << 8)
IOERR_CORRUPTFS: Final = 10 | (33 << 8)  # what SQLite makes of EIO from a read
IOERR_FSYNC: Final = 10 | (4 << 8)

_METHODS: Final = (  # in the order of `sqlite3_io_methods`, after its version
    *("close", "read", "write", "truncate", "sync", "file_size", "lock", "unlock"),
    *("check_reserved_lock", "file_control", "sector_size", "device_characteristics"),
    *("shm_map", "shm_lock", "shm_barrier", "shm_unmap", "fetch", "unfetch"),
)

_MORE: Final = (  # in the order of `sqlite3_vfs`, after what we name
    *("access", "full_pathname", "dl_open", "dl_error", "dl_sym", "dl_close", "randomness"),
    *("sleep", "current_time", "last_error", "current_time_int64"),
    *("set_system_call", "system_call", "next_system_call"),
)


class _IoMethods(Structure):
    _fields_ = (("version", c_int), *((name, c_void_p) for name in _METHODS))


class _File(Structure):
    _fields_ = (("methods", POINTER(_IoMethods)),)


class _Vfs(Structure):
    _fields_ = (
        ("version", c_int),
        ("file_bytes", c_int),
        ("path_max", c_int),
        ("next", c_void_p),
        ("name", c_char_p),
        ("app_data", c_void_p),
        ("open", c_void_p),
        ("delete", c_void_p),
        *((name, c_void_p) for name in _MORE),
    )


_SHAPES: Final = {
    "open": CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p),
    "delete": CFUNCTYPE(c_int, c_void_p, c_void_p, c_int),
    "sleep": CFUNCTYPE(c_int, c_void_p, c_int),
    "read": CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64),
    "write": CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64),
    "truncate": CFUNCTYPE(c_int, c_void_p, c_int64),
    "sync": CFUNCTYPE(c_int, c_void_p, c_int),
    "file_size": CFUNCTYPE(c_int, c_void_p, c_void_p),
    "lock": CFUNCTYPE(c_int, c_void_p, c_int),
    "shm_map": CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_int, c_void_p),
    "shm_lock": CFUNCTYPE(c_int, c_void_p, c_int, c_int, c_int),
}
_UNLOCK: Final = 1  # SQLITE_SHM_UNLOCK: to give a lock back never fails


@dataclass(frozen=True)
class Operation:
    """Something that was done to a file.

    Attributes:
        kind: ``write``, ``truncate``, ``sync``, ``failed sync``, ``delete`` or ``mark``.
        path: of the file; of a mark, what it says.
        offset: of a write; the new size of a truncation; whether a deletion was synced.
        data: of a write.
    """

    kind: str
    path: str
    offset: int = 0
    data: bytes = b""


@dataclass
class Shim:
    """What SQLite's files shall suffer, and what was done to them.

    Attributes:
        fails: names of the calls that count (``write``, ``sync``, ``shm_lock`` ...).
        suffix: only files whose name ends like this count.
        at: the number of the call that fails, from 1; 0 for none.
        code: what it returns to SQLite.
        is_persistent: whether all later ones fail too.
        does_it: whether a failing call is carried out nevertheless.
        calls: how many have counted.
        hits: how many have failed.
        has_shared_memory: whether new files can have any; a write-ahead log needs it.
        when_hit: called once, right before a failing call returns.
        log: every change of a file, in order; None not to keep it.
    """

    fails: Sequence[str] = ()
    suffix: str = ""
    at: int = 0
    code: int = OK
    is_persistent: bool = False
    does_it: bool = False
    calls: int = 0
    hits: int = 0
    has_shared_memory: bool = True
    when_hit: Callable[[], object] | None = None
    log: list[Operation] | None = None
    _paths: dict[int, str] = field(default_factory=dict)

    def fail(self, *calls: str, at: int, code: int, **more: Any) -> None:
        """Have the call number ``at`` fail from here on."""
        self.fails, self.at, self.code, self.calls, self.hits = calls, at, code, 0, 0
        self.suffix = more.get("suffix", "")
        self.is_persistent = more.get("is_persistent", False)
        self.does_it = more.get("does_it", False)

    def heal(self) -> None:
        """Nothing fails any more."""
        self.at = 0

    def mark(self, text: str) -> None:
        """Write down that something has happened outside of the files."""
        if self.log is not None:
            self.log.append(Operation("mark", text))

    def _verdict(self, call: str, path: str) -> int:
        if call not in self.fails or not path.endswith(self.suffix):
            return OK
        self.calls += 1
        if self.at and (self.calls == self.at or (self.is_persistent and self.calls > self.at)):
            self.hits += 1
            return self.code
        return OK

    def _keep(self, kind: str, path: str, offset: int = 0, data: bytes = b"") -> None:
        if self.log is not None:
            self.log.append(Operation(kind, path, offset, data))


class _Hooks:
    """The functions that SQLite calls instead of the system's."""

    def __init__(self, shim: Shim, system: _Vfs) -> None:
        self._shim = shim
        self._system = system
        self._tables: dict[int, _IoMethods] = {}
        self._kept: list[Any] = []  # SQLite holds the addresses: they must not be collected

    def vfs(self) -> _Vfs:
        copy = _Vfs.from_buffer_copy(self._system)
        copy.name = b"shim"
        copy.open = self._hook("open", self._open)
        copy.delete = self._hook("delete", self._delete)
        copy.sleep = self._hook("sleep", lambda _vfs, microseconds: int(microseconds))  # at once
        self._kept.append(copy)
        return copy

    def _hook(self, name: str, function: Any) -> int | None:
        callback = _SHAPES[name](function)
        self._kept.append(callback)
        return ctypes.cast(callback, c_void_p).value

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: int) -> int:
        path = ctypes.string_at(name).decode() if name else ""  # SQLite keeps the address itself
        if verdict := self._shim._verdict("open", path):
            ctypes.cast(file, POINTER(c_void_p))[0] = None  # no methods: nothing to close
            return verdict
        code = int(_SHAPES["open"](self._system.open)(vfs, name, file, flags, out))
        opened = ctypes.cast(file, POINTER(_File)).contents
        if code == OK and path and opened.methods:
            self._shim._paths[file] = path
            address = ctypes.addressof(opened.methods.contents)
            if address not in self._tables:
                self._tables[address] = self._table(opened.methods.contents)
            opened.methods = ctypes.pointer(self._tables[address])
        return code

    def _delete(self, vfs: int, name: int, is_synced: int) -> int:
        path = ctypes.string_at(name).decode()
        if verdict := self._shim._verdict("delete", path):
            return verdict
        code = int(_SHAPES["delete"](self._system.delete)(vfs, name, is_synced))
        if code == OK:
            self._shim._keep("delete", path, is_synced)
        return code

    def _table(self, original: _IoMethods) -> _IoMethods:
        """The functions of one kind of file; the system has several, by how it locks."""
        table = _IoMethods.from_buffer_copy(original)
        for name in ("read", "write", "truncate", "sync", "file_size", "lock", "shm_map"):
            if getattr(original, name):  # a journal has no shared memory
                setattr(table, name, self._hook(name, self._through(name, original)))
        if original.shm_lock:
            table.shm_lock = self._hook("shm_lock", self._shm_lock(original))
        if not self._shim.has_shared_memory:
            table.version = 1  # as with many network file systems
        return table

    def _through(self, name: str, original: _IoMethods) -> Any:
        shape, shim = _SHAPES[name], self._shim
        call = shape(getattr(original, name))

        def hook(file: int, *arguments: Any) -> int:
            path = shim._paths[file]
            verdict = shim._verdict(name, path)
            if verdict and name == "sync":
                shim._keep("failed sync", path)
            if verdict and not shim.does_it:
                return verdict
            code = int(call(file, *arguments))
            if code == OK and shim.log is not None:
                if name == "write":
                    data, size, offset = arguments
                    shim._keep(name, path, offset, ctypes.string_at(data, size))
                elif name == "truncate":
                    shim._keep(name, path, arguments[0])
                elif name == "sync" and not verdict:
                    shim._keep(name, path)
            if verdict and shim.when_hit is not None:
                when_hit, shim.when_hit = shim.when_hit, None
                when_hit()
            return verdict or code

        return hook

    def _shm_lock(self, original: _IoMethods) -> Any:
        shim, call = self._shim, _SHAPES["shm_lock"](original.shm_lock)

        def hook(file: int, offset: int, count: int, flags: int) -> int:
            verdict = OK if flags & _UNLOCK else shim._verdict("shm_lock", shim._paths[file])
            return verdict or int(call(file, offset, count, flags))

        return hook


def replace_system_call(name: str, function: Any) -> None:
    """Have SQLite's own VFS call a function in place of one of the system's, for good."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    vfs = library.sqlite3_vfs_find(None)
    replace = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p)(vfs.contents.set_system_call)
    assert replace(ctypes.addressof(vfs.contents), name.encode(), function) == OK


@contextmanager
def shim() -> Iterator[Shim]:
    """Have every file that SQLite opens from here on go through a `Shim`."""
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    library.sqlite3_vfs_register.argtypes = [POINTER(_Vfs), c_int]
    library.sqlite3_vfs_unregister.argtypes = [POINTER(_Vfs)]
    sqlite3.connect(":memory:").close()  # SQLite registers its own when it starts
    found = library.sqlite3_vfs_find(None)
    control = Shim()
    hooks = _Hooks(control, _Vfs.from_buffer_copy(found.contents))
    vfs = hooks.vfs()
    library.sqlite3_vfs_register(ctypes.byref(vfs), 1)
    try:
        yield control
    finally:
        control.heal()
        library.sqlite3_vfs_unregister(ctypes.byref(vfs))
        library.sqlite3_vfs_register(found, 1)
        _alive.append(hooks)


_alive: list[_Hooks] = []
"""A connection that outlives its test still calls them."""
