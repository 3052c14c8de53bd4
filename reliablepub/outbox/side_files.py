"""The files beside an outbox: none may give another user a right that the outbox itself does not.

Knows: their names, owners and modes; how they are opened and read. Must never know: what is in
them.

In a folder that other users can write to, any of them can create ``outbox.db-wal`` before SQLite
does, and SQLite writes message bodies into the file it finds. The sticky bit does not help: it
stops renaming and removing, not creating. So every side file is looked at before the outbox is
opened, and again after, when SQLite holds its log open and the sticky bit keeps it in place.

For a process of root, SQLite gives a file that it finds to the owner of the database, and the
second look would not know it again. So where that can happen, the log is created here, and found to
be the same file after the opening.
"""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from reliablepub.errors import OutboxError

LOGGER: Final = logging.getLogger("reliablepub.outbox")
OF_SQLITE: Final = ("-wal", "-shm", "-journal")
OURS: Final = (".lock", ".relay", ".relay.new", ".ballast")
_OTHERS: Final = 0o077


def check_side_files(outbox: Path, suffixes: tuple[str, ...] = (*OF_SQLITE, *OURS)) -> None:
    """Refuse an outbox with a file beside it that another user has planted or can use.

    Args:
        outbox: its path; it need not exist yet.
        suffixes: of the files to look at; missing ones are fine.

    Raises:
        OutboxError: a file is no regular file, has a second name, belongs to a user who may not
            write to the outbox, or gives others more rights than the outbox does.
    """
    base = os.fspath(outbox)
    for suffix in suffixes:
        try:
            found = os.lstat(base + suffix)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutboxError(f"{base + suffix} cannot be used: {error.strerror}") from error
        _check(outbox, suffix, found)


def takes_over(outbox: Path) -> bool:
    """Whether SQLite would take over a log that another user has planted: only for root."""
    return os.geteuid() == 0 and bool(folder_exposure(outbox.parent))


def claim_log(outbox: Path) -> list[tuple[int, int]]:
    """Create the log and its index where they are missing; device and number of each file.

    A database that is empty has none: SQLite would remove it.

    Raises:
        OutboxError: one that is there is refused, for the reasons of `check_side_files`.
    """
    main = outbox.stat()
    files: list[tuple[int, int]] = []
    if not main.st_size:
        return files
    for suffix in ("-wal", "-shm"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # which follows no link
        try:
            fd = os.open(os.fspath(outbox) + suffix, flags, 0o600)
        except FileExistsError:
            pass
        except OSError:
            continue  # nothing can be created here: SQLite will say so
        else:
            try:
                os.fchown(fd, main.st_uid, main.st_gid)
                os.fchmod(fd, stat.S_IMODE(main.st_mode))
            finally:
                os.close(fd)
        check_side_files(outbox, (suffix,))
        with suppress(FileNotFoundError):  # another process has closed the outbox
            found = os.lstat(os.fspath(outbox) + suffix)
            files.append((found.st_dev, found.st_ino))
    return files


def open_side_file(outbox: Path, suffix: str, flags: int) -> int:
    """Open a side file without following a link or waiting for a pipe; created with mode 0600.

    Args:
        outbox: its path.
        suffix: of the file, one of `OURS`.
        flags: of ``os.open``.

    Returns:
        A file descriptor, not inherited by programs that this one starts.

    Raises:
        OutboxError: the file is refused, for the reasons of `check_side_files`.
        OSError: it cannot be opened.
    """
    safely = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(os.fspath(outbox) + suffix, flags | safely, 0o600)
    try:
        _check(outbox, suffix, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_side_file(outbox: Path, suffix: str, bytes_max: int) -> bytes:
    """The content of a side file, at most ``bytes_max`` bytes of it.

    Raises:
        OutboxError: the file is refused, for the reasons of `check_side_files`.
        OSError: it cannot be read.
    """
    with open(open_side_file(outbox, suffix, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read(bytes_max)


@cache
def warn_of_folder(folder: Path) -> None:
    """Log, once, that other users can create files in the folder of an outbox.

    It is a warning and no error, because volumes of containers are often made so; a file that was
    planted there is an error.
    """
    if words := folder_exposure(folder):
        LOGGER.warning("%s", words)


def folder_exposure(folder: Path) -> str:
    """Which other users can write to a folder, and what to do; empty if none can."""
    found = folder.stat()
    if found.st_mode & stat.S_IWOTH:
        who = "every user can"
    elif found.st_uid not in (os.geteuid(), 0):
        who = f"user {found.st_uid}, who owns it, can"
    elif found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        who = f"members of group {found.st_gid} can"
    else:
        return ""
    is_sticky = found.st_mode & stat.S_ISVTX and found.st_uid in (os.geteuid(), 0)
    harm = "block the outbox with files of their own" if is_sticky else "replace the outbox"
    return (
        f"{who} write to folder {folder}, and so {harm}; keep the outbox in a folder that only "
        "its owner can write to (mode 0700)"
    )


def _check(outbox: Path, suffix: str, found: os.stat_result) -> None:
    name = f"{outbox}{suffix}"
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise _refused(outbox, f"{name} is {what}", "remove it")
    if found.st_nlink > 1:
        raise _refused(outbox, f"{name} has a second name (a hard link)", "remove the other one")
    try:
        main = outbox.stat()
        owner, group, mode = main.st_uid, main.st_gid, main.st_mode
    except OSError:
        owner, group, mode = os.geteuid(), os.getegid(), 0o600
    if found.st_uid not in (owner, 0) and not _may_write(found.st_uid, group, mode):
        raise _refused(
            outbox,
            f"{name} belongs to user {found.st_uid}, and the outbox to user {owner}",
            "give the file back (chown) if it was made by mistake, and remove it if it was planted",
        )
    if found.st_mode & ~mode & _OTHERS:
        raise _refused(
            outbox,
            f"{name} has mode {stat.S_IMODE(found.st_mode):04o}, which lets in users whom the "
            f"outbox's own mode {stat.S_IMODE(mode):04o} keeps out",
            f"chmod {stat.S_IMODE(mode):o} {name}",
        )


def _refused(outbox: Path, what: str, remedy: str) -> OutboxError:
    return OutboxError(
        f"outbox {outbox} was not opened: {what}, so messages could be read or changed through "
        f"it; {remedy}, and keep the outbox in a folder that only its owner can write to"
    )


def _may_write(user: int, group: int, mode: int) -> bool:
    """Whether the mode of an outbox lets a user other than its owner write to it."""
    if mode & stat.S_IWOTH:
        return True
    if not mode & stat.S_IWGRP:
        return False
    try:
        record = pwd.getpwuid(user)
    except KeyError:
        return False
    return group in os.getgrouplist(record.pw_name, record.pw_gid)


def _is_private_group(group: int) -> bool:
    """Whether a group has one member, this user, as distributions set it up by default."""
    try:
        user, record = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        record.gr_gid == user.pw_gid
        and record.gr_name == user.pw_name
        and set(record.gr_mem) <= {user.pw_name}
    )
