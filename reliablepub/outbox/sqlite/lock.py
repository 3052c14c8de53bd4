"""Who relays an outbox: one process at a time, and the kernel knows when it is dead.

Knows: ``flock`` on a file beside the outbox. Must never know: what is in the outbox.

The lock is never put on the outbox itself: closing *any* descriptor of a file drops this process's
POSIX locks on it, and with them SQLite's. ``flock`` ends with the last descriptor of the one open
file, however the process ends; there is no time-out, and nothing to clean up. A fork shares that
open file: a child would keep the lock of a dead parent, so a forked child closes its copy at once
(closing does not release; ``LOCK_UN`` would, also for the parent, and is never used). Only a fork
that Python does not see (in a C library) can still hold the lock longer than its owner lives.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, wait_fixed

from reliablepub.errors import OutboxError, OutboxInUse
from reliablepub.outbox.sqlite.failures import os_error
from reliablepub.outbox.sqlite.location import open_side_file, read_side_file

ACQUIRE_TIMEOUT_S = 1.0
"""A predecessor that was killed is given this long to be gone."""
BORROWED_MAX_S = 30.0
"""Who has borrowed the relay lock for a checkpoint is given this long."""

_SUFFIX = ".lock"
_PID_BYTES_MAX = 32
_held: weakref.WeakSet[RelayLock] = weakref.WeakSet()


class _Taken(Exception):
    """Somebody else holds the lock now."""


def lock_path(outbox: Path) -> Path:
    """The file whose lock is the relay lock."""
    return outbox.with_name(outbox.name + _SUFFIX)


class RelayLock:
    """The right to relay one outbox, from construction until `release` or the end of the process.

    Args:
        outbox: its path.
        timeout_s: how long a relay that has it is waited for.

    Raises:
        OutboxInUse: another process (or publisher in this process) has it; says which.
        OutboxError: the lock file cannot be used, or is another user's.
    """

    def __init__(self, outbox: Path, *, timeout_s: float = ACQUIRE_TIMEOUT_S) -> None:
        self._path = lock_path(outbox)
        self._fd = -1
        attempts = Retrying(
            retry=retry_if_exception_type(_Taken),
            # Who has it without a name has borrowed it, and will not be long.
            stop=lambda state: (
                (state.seconds_since_start or 0.0)
                >= (BORROWED_MAX_S if _named_pid(outbox) is None else timeout_s)
            ),
            wait=wait_fixed(0.02),
            reraise=True,
        )
        try:
            self._fd = attempts(_locked_fd, outbox)
            os.ftruncate(self._fd, 0)
            os.pwrite(
                self._fd, f"{os.getpid()}\n".encode(), 0
            )  # for people, and for the loser's error
        except _Taken:
            pid = _named_pid(outbox)
            who = f"process {pid}" if pid else "another process"
            raise OutboxInUse(
                f"outbox {outbox} is relayed by {who}, and there can be only one relay; stop it, "
                "or only enqueue here"
            ) from None
        except OSError as error:
            self.release()
            raise os_error(self._path, error) from error
        _held.add(self)

    @classmethod
    def borrow(cls, outbox: Path) -> RelayLock | None:
        """Have it for a moment, without a name: who asks will see no relay. None if it is taken."""
        relay_lock = cls.__new__(cls)
        relay_lock._path, relay_lock._fd = lock_path(outbox), -1  # noqa: SLF001 - same class
        try:
            relay_lock._fd = _locked_fd(outbox)  # noqa: SLF001
            os.ftruncate(relay_lock._fd, 0)  # noqa: SLF001 - a relay that was killed has left its name
        except (_Taken, OSError, OutboxError):
            relay_lock._drop()  # noqa: SLF001
            return None
        _held.add(relay_lock)
        return relay_lock

    @property
    def is_held(self) -> bool:
        """Whether this process has the relay lock; never true in a forked child."""
        return self._fd >= 0

    def release(self) -> None:
        """Let the next one have it. The file stays: without it, two processes could lock two."""
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
    """Process that relays an outbox now, or None.

    Looks for a moment whether the lock is free; a relay that acquires it just then tries again.
    """
    pid = _named_pid(outbox)
    if pid is None:
        return None
    try:
        fd = open_side_file(outbox, _SUFFIX, os.O_RDONLY)
    except (OSError, OutboxError):
        return None
    try:
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
        is_current = os.fstat(fd).st_ino == lock_path(outbox).lstat().st_ino
    except (BlockingIOError, FileNotFoundError):
        is_current = False
    except BaseException:
        os.close(fd)
        raise
    if not is_current:  # taken, or the file was removed in between
        os.close(fd)
        raise _Taken
    return fd


def _named_pid(outbox: Path) -> int | None:
    try:
        text = read_side_file(outbox, _SUFFIX, _PID_BYTES_MAX).strip()
    except (OSError, OutboxError):
        return None
    return int(text) if text.isdigit() else None


def _drop_in_child() -> None:
    for relay_lock in list(_held):
        relay_lock._drop()  # noqa: SLF001 - same module


os.register_at_fork(after_in_child=_drop_in_child)
