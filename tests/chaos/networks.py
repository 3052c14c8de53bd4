"""`Network`: a host's own network, as Linux has them (network namespaces); only root can make one.

It knows namespaces. It must never know which servers or clients are in them. Everything listens on
loopback here too: a socket stays in the network in which it was made. So a proxy
can listen in one network, and pass on to another.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

_CLONE_NEWNET: Final = 0x40000000
_numbers = itertools.count(1)


def are_possible() -> bool:
    """Whether networks can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


def enter(path: str) -> None:
    """Move this thread, and the processes that it starts, into a network."""
    with Path(path).open() as network:
        _enter(network.fileno())


def _enter(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot enter the network")


class Network:
    """A network that has only a loopback, until it ends.

    Attributes:
        path: what `enter` takes.
        link: the name of its link to a bridge, once it has one.
    """

    def __enter__(self) -> Self:
        self._name = f"reliablepub-{os.getpid()}-{next(_numbers)}"
        self._ip("netns", "add", self._name)
        self.path = f"/run/netns/{self._name}"
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self._ip("netns", "delete", self._name)

    @contextmanager
    def within(self) -> Iterator[None]:
        """For the block, this thread makes its sockets there."""
        with Path("/proc/thread-self/ns/net").open() as before:
            enter(self.path)
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self) -> None:
        """Let nothing pass any more. The ends of a connection are not told."""
        self._ip("-n", self._name, "link", "set", "lo", "down")

    def mend(self) -> None:
        """Let everything pass."""
        self._ip("-n", self._name, "link", "set", "lo", "up")

    def plug(self, bridge: str, address: str) -> None:
        """Link it to a bridge in the network of this process; its end there is named like `link`.

        Args:
            bridge: its name.
            address: of this network, which has 254 of them.
        """
        self.link = f"link{next(_numbers)}"
        peer = ["peer", "name", "uplink", "netns", self._name]
        self._ip("link", "add", self.link, "type", "veth", *peer)
        self._ip("link", "set", self.link, "master", bridge, "up")
        self._ip("-n", self._name, "address", "add", f"{address}/24", "dev", "uplink")
        self._ip("-n", self._name, "link", "set", "uplink", "up")

    def unplug(self) -> None:
        """Let nothing pass to or from the bridge; neither side is told."""
        self._ip("link", "set", self.link, "down")

    def plug_again(self) -> None:
        """Let everything pass again."""
        self._ip("link", "set", self.link, "up")

    def swallow(self, address: str) -> None:
        """Let nothing leave for an address."""
        self._ip("-n", self._name, "route", "replace", "blackhole", f"{address}/32")

    def swallow_nothing(self) -> None:
        """Let everything leave again."""
        self._ip("-n", self._name, "route", "flush", "type", "blackhole")

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)
