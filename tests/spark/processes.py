"""Processes of a Spark program, found from its root downwards, to be killed.

Knows: /proc. Must never know: Spark's API. Nothing is found, or killed, that is not below the root.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DAEMON = "pyspark.daemon"
EXECUTOR = "CoarseGrainedExecutorBackend"
DRIVER = "org.apache.spark.deploy.SparkSubmit"


def descendants(root: int) -> Iterator[int]:
    """Every process below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_parent(int(entry.name)), []).append(int(entry.name))
    open_ends = [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), []):
            yield pid
            open_ends.append(pid)


def python_workers(root: int) -> list[int]:
    """Those that run tasks: forked from a daemon, with its command line."""
    return [
        pid
        for pid in descendants(root)
        if DAEMON in _command(pid) and DAEMON in _command(_parent(pid))
    ]


def connected(pids: list[int], port: int) -> list[int]:
    """Those of the processes that have a TCP connection to this port of some host."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[2].endswith(f":{port:04X}")}
    return [pid for pid in pids if not sockets.isdisjoint(_open_files(pid))]


def executors(root: int) -> list[int]:
    """The Java machines of executors."""
    return [pid for pid in descendants(root) if EXECUTOR in _command(pid)]


def drivers(root: int) -> list[int]:
    """The Java machines of drivers."""
    return [pid for pid in descendants(root) if DRIVER in _command(pid)]


def kill(pids: list[int]) -> int:
    """SIGKILL; returns how many were still there."""
    killed = 0
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed += 1
    return killed


def _open_files(pid: int) -> Iterator[str]:
    with suppress(FileNotFoundError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                yield os.fspath(file.readlink())


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
