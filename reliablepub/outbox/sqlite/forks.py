"""Closes SQLite connections before a fork; in the child, refuses files that stayed open.

Knows: SQLite's table of locks, the descriptors of the process. Must never know: the content of an
outbox.

In each process, SQLite has one table of open files and the locks that it holds on them. A fork
copies the table but not the locks: POSIX locks belong to one process. A *new* connection in the
child finds the file locked in the table, and does not lock it. When the parent closes its last
connection, it gets the exclusive lock and deletes the write-ahead log. The child then commits into
the deleted log without an error. Two rules prevent that:

- Before a fork, no thread may begin to use SQLite, the fork waits for calls under way, and every
  connection of this library is closed. With no connection left, SQLite removes the file from its
  table. Parent and child reopen it when they need it.
- In the child, a database file that was open at the fork is never opened again. A file stays open
  if the application has a connection to it, if a call did not end in time, or if a C library forked
  without Python's hooks. For a file that was open before this module was imported, `location`
  checks whether its lock is real.
"""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import stat
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from reliablepub.errors import OutboxForked, OutboxLocked

Inode = tuple[int, int]
"""Device and inode number, which identify a file regardless of its name."""

QUIET_TIMEOUT_S: Final = 15.0
"""How long a fork waits for calls under way. A call waits up to 5 s for a lock of SQLite. For a
fork, which may itself wait for another call, it waits twice as long as this. Without the wait, a
child whose parent relays would be refused the outbox by chance: whenever the relay commits."""
REST_TIMEOUT_S: Final = 1.0
"""How long a thread that finds SQLite's locks lost waits for calls under way in other threads."""
_DESCRIPTORS_MAX: Final = 1 << 20
"""The most descriptors that Linux allows a process by default (``fs.nr_open``)."""
_MAGIC: Final = b"SQLite format 3\0"


class Keeper(Protocol):
    """An object that keeps a connection open between uses."""

    def rest(self) -> None:
        """Close the connection until the next use. No use is under way.

        In a forked child the connection belongs to the parent, and is abandoned instead.
        """


class Gate:
    """Prevents forks during uses of SQLite, and uses during forks. Reentrant, also for signals."""

    def __init__(self) -> None:
        self._keepers = weakref.WeakValueDictionary[int, Keeper]()  # by their ``id``
        self._torn: set[Inode] = set()
        # A fork before this module was imported may have lost their locks: `location` checks that.
        self.open_before: Final = _open_databases()
        self.forks: int = 0  # grows in each forked child: whoever finds another number is a child
        self._reset()

    def _reset(self) -> None:
        # Where callers pass, the lock itself, which is C code: a signal handler that raises in a
        # method of `Condition` could leave it locked for ever. And nothing is called there while
        # it is held: Python runs handlers after calls, and one may wait for the relay, which needs
        # the lock. While another thread forks, it has to be told, and that cannot be avoided.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._using: dict[int, int] = {}
        self._forker: int | None = None
        self._pid = os.getpid()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Delay forks until the block ends; wait at its start while another thread forks.

        The block may end in another thread than it began in, for instance when a generator that was
        not exhausted is collected.
        """
        use = self.begin_use()
        try:
            yield
        finally:
            self.end_use(use)

    def begin_use(self) -> tuple[int, int]:
        """Begin a use without a ``with`` block; return the argument of `end_use`."""
        if os.getpid() != self._pid:
            self._after_in_child()  # a C library forked without Python's hooks
        me = threading.get_ident()
        with self._lock:
            if self._forker not in (None, me) and me not in self._using:
                self._wait_for_fork()
            using = self._using
            using[me] = using[me] + 1 if me in using else 1
        return me, self._pid

    def _wait_for_fork(self) -> None:
        # A hook of the application may wait for a lock that the thread of this call holds.
        if not self._changed.wait_for(lambda: self._forker is None, 2 * QUIET_TIMEOUT_S):
            raise OutboxLocked(
                "another thread of this process has been forking for "
                f"{2 * QUIET_TIMEOUT_S:.0f} s; nothing was stored; try again"
            )

    def end_use(self, use: tuple[int, int]) -> None:
        """End a use, in any thread. One that began before a fork has no effect in the child."""
        thread, pid = use
        if os.getpid() != pid:
            return
        with self._lock:
            using = self._using
            left = using[thread] - 1 if thread in using else 0
            if left:
                using[thread] = left
            elif thread in using:
                del using[thread]
            if self._forker is not None:
                self._changed.notify_all()

    def keep(self, keeper: Keeper) -> None:
        """Close the keeper's connection before each fork."""
        self._keepers[id(keeper)] = keeper

    def _kept(self) -> list[Keeper]:
        # `valuerefs` makes its list in one step: other threads add keepers, and take no lock.
        references = self._keepers.valuerefs()
        return [keeper for reference in references if (keeper := reference()) is not None]

    def check(self, path: Path, found: os.stat_result) -> None:
        """Refuse a file that was open when this process was forked."""
        if os.getpid() != self._pid:
            self._after_in_child()
        if (found.st_dev, found.st_ino) in self._torn:
            raise forked(path, "was open when this process was forked")

    def rest(self) -> None:
        """Close the connections of all keepers, within a use of this thread: locks were lost."""
        me = threading.get_ident()
        with self._lock:
            if self._forker is not None:
                return  # that fork closes them, as soon as this use has ended
            self._forker = me
        try:
            with self._lock:
                is_quiet = self._changed.wait_for(
                    lambda: not self._using.keys() - {me}, REST_TIMEOUT_S
                )
            if is_quiet:
                # SQLite takes its lock on a file anew only when no connection here has it open.
                for keeper in self._kept():
                    keeper.rest()
        finally:
            self._after_in_parent()

    # ------------------------------------------------------------------ hooks of os.fork

    def _before(self) -> None:
        me = threading.get_ident()
        with self._changed:
            while self._forker not in (None, me):  # another thread forks
                self._changed.wait()
            self._forker = me
            is_quiet = self._changed.wait_for(
                lambda: not self._using.keys() - {me}, QUIET_TIMEOUT_S
            )
        if is_quiet and me not in self._using:
            for keeper in self._kept():
                keeper.rest()

    def _after_in_parent(self) -> None:
        with self._changed:
            self._forker = None
            self._changed.notify_all()

    def _after_in_child(self) -> None:
        self.forks += 1
        self._reset()
        self._torn |= _open_databases()
        for keeper in self._kept():
            keeper.rest()


def forked(path: Path, what: str) -> OutboxForked:
    """Make the error for a file on which SQLite's table has locks that this process lacks."""
    return OutboxForked(
        f"outbox {path} {what} (process {os.getpid()}), so SQLite's locks on it do not hold here, "
        "and what is stored could be lost; nothing was stored. Close the application's own "
        "connections to it before a fork, or start workers with the spawn or forkserver method"
    )


def open_files() -> dict[Inode, list[int]]:
    """Return this process's open regular files, each with its descriptors; empty if unknown."""
    found: dict[Inode, list[int]] = {}
    for descriptor in _descriptors():
        try:
            file = os.fstat(descriptor)
        except OSError:
            continue  # the descriptor of the listing itself, or one that is not open
        if stat.S_ISREG(file.st_mode):
            found.setdefault((file.st_dev, file.st_ino), []).append(descriptor)
    return found


def _descriptors() -> Iterable[int]:
    """Return the open descriptors, if the system tells them, and perhaps some that are closed."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return map(int, os.listdir(folder))  # noqa: PTH208 - faster than `Path.iterdir`
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:  # none is free to list them with
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                return range(min(limit, _DESCRIPTORS_MAX))
    return ()


def abandon(connection: sqlite3.Connection) -> None:
    """Keep a connection open until the process ends: closing it could delete a log in use."""
    try:
        import ctypes  # noqa: PLC0415 - takes 3 ms, and is rarely needed

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))
    except (ImportError, OSError, AttributeError, MemoryError):  # as in `location.libc`
        # SQLite owns the function, the function its connection: no collector sees the cycle.
        holder = sqlite3.connect(":memory:", check_same_thread=False)
        holder.create_function("reliablepub_held", 0, lambda: id((holder, connection)))


def _open_databases() -> set[Inode]:
    return {inode for inode, fds in open_files().items() if _is_database(fds[0])}


def _is_database(fd: int) -> bool:
    try:
        return os.pread(fd, len(_MAGIC), 0) == _MAGIC
    except OSError:
        return False  # not open for reading, so not SQLite's


GATE: Final = Gate()

os.register_at_fork(
    before=GATE._before,  # noqa: SLF001 - same module
    after_in_parent=GATE._after_in_parent,  # noqa: SLF001
    after_in_child=GATE._after_in_child,  # noqa: SLF001
)
