"""The relay lock: one process at a time relays an outbox. The kernel ends it with the process.

Knows: ``flock`` on a file beside the outbox. Must never know: what is in the outbox.

The lock is on a file of its own, because closing *any* descriptor of the database would drop this
process's POSIX locks on it, which are SQLite's. ``flock`` ends when the last descriptor of the open
file is closed, however the process ends. It needs no timeout and no cleanup. A forked child shares
the open file and would keep the lock of a dead parent, so it closes its descriptor at once. That
does not release the lock; ``LOCK_UN`` would, also for the parent, and is never used. No fork comes
between locking the file and noting that (`forks.Gate`). The lock can outlive its owner after a fork
that Python does not see (in a C library), or one that has waited too long for other threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, wait_fixed

from reliablepub.errors import OutboxError, OutboxInUse
from reliablepub.outbox.sqlite.failures import os_error
from reliablepub.outbox.sqlite.forks import GATE, open_files
from reliablepub.outbox.sqlite.location import look, open_side_file, read_side_file

ACQUIRE_TIMEOUT_S = 1.0
"""How long to wait for a relay that was killed to exit."""
BORROWED_MAX_S = 30.0
"""How long to wait for a process that has borrowed the lock for a checkpoint."""

_SUFFIX = ".lock"
_PID_BYTES_MAX = 32
_held: weakref.WeakSet[RelayLock] = weakref.WeakSet()


class _Taken(Exception):
    """Another process, or another publisher of this process, holds the lock."""


def _described(pid: int | None, path: Path) -> str:
    """The process of another relay, and what can be done about it."""
    # In another container, another process can have the same id.
    if pid == os.getpid() and look(os.fsencode(path))[0] in open_files():
        return (
            "another publisher of this process; use that one, close it (if no variable refers to "
            "it any more, as after running a notebook cell twice, restart the process)"
        )
    if pid and pid == os.getppid():
        return (
            f"process {pid}, the parent of this one; a reloader (as of Flask or Django) loads a "
            "program in both: open the publisher where requests are served"
        )
    who = f"process {pid}" if pid else "another process"
    return f"{who}, and there can be only one relay; stop it"


def lock_path(outbox: Path) -> Path:
    """Return the path of the lock file of an outbox."""
    return outbox.with_name(outbox.name + _SUFFIX)


class RelayLock:
    """The right to relay one outbox, from construction to `release` or the end of the process."""

    def __init__(self, outbox: Path, *, timeout_s: float = ACQUIRE_TIMEOUT_S) -> None:
        self._outbox = outbox
        self._path = lock_path(outbox)
        self._fd = -1
        attempts = Retrying(
            retry=retry_if_exception_type(_Taken),
            # A lock file without a process id: the lock is borrowed, and will be released soon.
            stop=lambda state: (
                (state.seconds_since_start or 0.0)
                >= (BORROWED_MAX_S if _named_pid(outbox) is None else timeout_s)
            ),
            wait=wait_fixed(0.02),
            reraise=True,
        )
        try:
            attempts(self._take)
            _name_process(self._fd)
        except _Taken:
            pid = _named_pid(outbox)
            raise OutboxInUse(
                f"outbox {outbox} is relayed by {_described(pid, self._path)}, or only enqueue here"
            ) from None
        except OSError as error:
            self.release()
            raise os_error(self._path, error) from error

    @classmethod
    def borrow(cls, outbox: Path) -> RelayLock | None:
        """Acquire the lock briefly, for work that excludes a relay; return None if it is held."""
        relay_lock = cls.__new__(cls)
        relay_lock._outbox = outbox  # noqa: SLF001 - same class
        relay_lock._path, relay_lock._fd = lock_path(outbox), -1  # noqa: SLF001
        try:
            relay_lock._take()  # noqa: SLF001
            # A killed relay leaves its process id. Without one, other processes see no relay.
            os.ftruncate(relay_lock._fd, 0)  # noqa: SLF001
        except (_Taken, OSError, OutboxError):
            relay_lock._drop()  # noqa: SLF001
            return None
        return relay_lock

    def _take(self) -> None:
        with GATE.use():  # a child that did not know of the lock would keep it
            self._fd = _locked_fd(self._outbox)
            _held.add(self)

    def keep(self) -> None:
        """Take the lock again if its file was deleted, replaced or emptied: others see no relay."""
        # If another relay has taken it meanwhile, the next commit raises `OutboxInUse`.
        with suppress(_Taken, OSError, OutboxError):
            held = os.fstat(self._fd)
            if not _leads_to(self._path, held):
                fd = self._fd
                self._take()
                os.close(fd)
            elif held.st_size:
                return
            _name_process(self._fd)

    @property
    def is_held(self) -> bool:
        """Whether this process holds the relay lock; always False in a forked child."""
        return self._fd >= 0

    def release(self) -> None:
        """Release the lock. The file stays: else two processes could lock two files of its name."""
        if self._fd < 0:
            return
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def holder_pid(outbox: Path) -> int | None:
    """Return the id of the process that relays the outbox now, or None."""
    pid = _named_pid(outbox)
    if pid is None:
        return None
    with GATE.use():  # a child would keep the shared lock
        try:
            fd = open_side_file(outbox, _SUFFIX, os.O_RDONLY)
        except (OSError, OutboxError) as error:
            _raise_shortage(outbox, error)
            return None
        try:
            # Held for a moment: a relay that starts just then tries again.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return pid
        finally:
            os.close(fd)
    return None


def _locked_fd(outbox: Path) -> int:
    fd = open_side_file(outbox, _SUFFIX, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = _leads_to(lock_path(outbox), os.fstat(fd))
    except BlockingIOError:
        is_current = False
    except BaseException:
        os.close(fd)
        raise
    if not is_current:  # locked by another process, or the file was removed in between
        os.close(fd)
        raise _Taken
    return fd


def _leads_to(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), file)
    except FileNotFoundError:
        return False


def _name_process(fd: int) -> None:
    """Write the process id, for operators, and for `OutboxInUse` in another process."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def _named_pid(outbox: Path) -> int | None:
    try:
        text = read_side_file(outbox, _SUFFIX, _PID_BYTES_MAX).strip()
    except (OSError, OutboxError) as error:
        _raise_shortage(outbox, error)
        return None
    return int(text) if text.isdigit() else None


def _raise_shortage(outbox: Path, error: OSError | OutboxError) -> None:
    """Raise if no descriptor is free: then it is unknown whether a relay runs."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise os_error(lock_path(outbox), error) from error


def _drop_in_child() -> None:
    for relay_lock in list(_held):
        relay_lock._drop()  # noqa: SLF001 - same module


os.register_at_fork(after_in_child=_drop_in_child)
