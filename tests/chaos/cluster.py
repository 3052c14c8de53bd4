"""`Cluster`: three RabbitMQ nodes on three hosts, which can lose sight of each other.

Each host is a network namespace with one link to a bridge. The bridge is in the network of this
process, which must be one of its own, as must be its mounts: see `apart`. It knows nodes and links;
it must never know what is published.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from tests.chaos.networks import Network
from tests.rabbitmq import ROOT, NotStarted, RabbitMQNode, Site

NAME: Final = "rabbits"
"""A host name with the addresses of all nodes."""
ADDRESSES: Final = ("10.77.0.1", "10.77.0.2", "10.77.0.3")
_HERE: Final = "10.77.0.254"
_TICK_S: Final = 4
_STARTS_WITHIN_S: Final = 240.0
_CONFIG: Final = """\
cluster_partition_handling = {handling}
mnesia_table_loading_retry_timeout = 5000
"""
# RabbitMQ 4 has another name for what runs, and no partitions once it has no Mnesia (4.3).
_IS_WHOLE: Final = """\
Nodes = {nodes},
Ask = fun(M, F) -> rpc:multicall(Nodes, M, F, [], 5000) end,
Has = fun(M, F) -> lists:keymember(F, 1, M:module_info(exports)) end,
{{Running, []}} = case Has(rabbit_nodes, list_running) of
    true -> Ask(rabbit_nodes, list_running);
    false -> Ask(rabbit_nodes, all_running)
end,
{{Seen, []}} = case Has(rabbit_node_monitor, partitions) of
    true -> Ask(rabbit_node_monitor, partitions);
    false -> {{[], []}}
end,
lists:all(fun(Some) -> length(Some) =:= length(Nodes) end, Running)
andalso lists:all(fun(Some) -> Some =:= [] end, Seen).
"""


def apart(*arguments: str) -> list[str]:
    """The command that runs Python with a network, mounts and host names of its own.

    When its starter dies, it is told by SIGTERM: it can clean up. If it is killed itself, networks,
    bridge and mounts end with it, and so do the nodes; only its directory stays.
    """
    return [
        *("setpriv", "--pdeathsig=TERM", "unshare", "--net", "--mount"),
        *(sys.executable, *arguments),
    ]


class NotWhole(Exception):
    """A cluster whose nodes were all restarted, and still do not all see each other."""


class Cluster:
    """Three nodes, all running and in sight of each other; everything ends with the process.

    Args:
        handling: `cluster_partition_handling`.
        folder: for everything that the nodes write, and a file of host names.

    Attributes:
        nodes: in the order in which they joined.
        networks: theirs.
    """

    def __init__(self, handling: str, folder: Path) -> None:
        self._config = _CONFIG.format(handling=handling)
        self._folder = folder

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._furnish()
            self.networks = [stack.enter_context(Network()) for _ in ADDRESSES]
            self.nodes: list[RabbitMQNode] = []
            for network, address in zip(self.networks, ADDRESSES, strict=True):
                network.plug("bridge", address)
                node = RabbitMQNode(
                    root=ROOT,
                    beside=self.nodes[0] if self.nodes else None,
                    site=Site(_host(address), address, network.path),
                    config=self._config,
                    tick_s=_TICK_S,
                )
                self.nodes.append(stack.enter_context(node))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _furnish(self) -> None:
        """A bridge, the host names, and a place for the names of networks."""
        hosts = self._folder / "hosts"
        lines = [f"{address} {_host(address)} {NAME}\n" for address in ADDRESSES]
        hosts.write_text("127.0.0.1 localhost\n" + "".join(lines))
        Path("/run/netns").mkdir(exist_ok=True)
        for command in (
            "mount -t tmpfs tmpfs /run/netns",
            f"mount --bind {hosts} {ROOT / 'etc/hosts'}",
            *(self._of_another_root(hosts) if Path("/") != ROOT else []),
            "ip link set lo up",
            "ip link add bridge type bridge",
            f"ip address add {_HERE}/24 dev bridge",
            "ip link set bridge up",
        ):
            subprocess.run(command.split(), check=True)

    def _of_another_root(self, hosts: Path) -> list[str]:
        """Publishers see the same host names, and nodes write into the same directory."""
        return [f"mount --bind {hosts} /etc/hosts", f"mount --bind {self._folder} {ROOT / 'tmp'}"]

    # ------------------------------------------------------------------ what nodes see

    @contextlib.contextmanager
    def hidden(self, *pairs: tuple[int, int]) -> Iterator[None]:
        """For the block, the first of each two nodes can send nothing to the second."""
        try:
            for one, other in pairs:
                self.networks[one].swallow(ADDRESSES[other])
            yield
        finally:
            for one, _ in pairs:
                self.networks[one].swallow_nothing()

    @contextlib.contextmanager
    def unplugged(self, number: int) -> Iterator[None]:
        """For the block, nobody reaches a node, the publisher neither."""
        self.networks[number].unplug()
        try:
            yield
        finally:
            self.networks[number].plug_again()

    # ------------------------------------------------------------------ how they are

    def is_whole(self) -> bool:
        """Whether every node says that all of them are running, and none is cut off."""
        nodes = ",".join(f"'{node.name}'" for node in self.nodes)
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return self.nodes[0].eval(_IS_WHOLE.format(nodes=f"[{nodes}]")) == "true"
        return False

    def become_whole(self, patience_s: float) -> int:
        """Wait until it is whole; then do what an operator would; how many nodes that restarted.

        Raises:
            NotWhole: it is not whole after a restart of all of them.
        """
        if self._is_whole_within(patience_s):
            return 0
        first, *others = self.nodes
        if first.is_running and self._restart(others):
            return len(others)
        self.restart()
        return len(self.nodes)

    def restart(self) -> None:
        """Kill all nodes and start them.

        Raises:
            NotWhole: they do not find each other.
        """
        if not self._restart(self.nodes):
            raise NotWhole("the cluster is not whole after a restart of all nodes")

    def _restart(self, nodes: Sequence[RabbitMQNode]) -> bool:
        for node in nodes:
            node.kill()
        for node in nodes:  # once all are gone: one that still runs would be split off
            node.launch()  # all at once: each may wait for another that was stopped after it
        try:
            for node in nodes:
                node.wait_until_ready()
        except NotStarted:
            return False
        return self._is_whole_within(_STARTS_WITHIN_S)

    def _is_whole_within(self, patience_s: float) -> bool:
        deadline = time.monotonic() + patience_s
        while not self.is_whole():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True


def _host(address: str) -> str:
    return f"rabbit{address.rpartition('.')[2]}"
