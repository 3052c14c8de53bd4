"""The RabbitMQ node of the other tests: it is private, and leaves nothing behind."""

from pathlib import Path

import pytest

from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

pytestmark = pytest.mark.rabbit


def processes_of(folder: Path) -> list[int]:
    """Who has the node's directory in its environment."""
    mark = b"HOME=" + bytes(folder)
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if mark in variables:
            found.append(int(environ.parent.name))
    return found


def test_pid_is_the_virtual_machine(rabbitmq_node: RabbitMQNode) -> None:
    command = Path(f"/proc/{rabbitmq_node.pid}/cmdline").read_bytes()
    assert command.split(b"\0")[0].endswith(b"/beam.smp")


def test_listens_on_loopback_only(rabbitmq_node: RabbitMQNode) -> None:
    listeners = rabbitmq_node.eval(
        "[inet:sockname(P) || P <- erlang:ports(), "
        'erlang:port_info(P, name) =:= {name, "tcp_inet"}].'
    )
    assert "127,0,0,1" in listeners.replace(" ", "")
    assert "0,0,0,0" not in listeners.replace(" ", "")


def test_nothing_is_left(rabbitmq_node: RabbitMQNode) -> None:
    assert rabbitmq_node.is_running  # it is here, and a second one does not disturb it
    with RabbitMQNode() as node:
        folder = node.folder
        assert len(processes_of(folder)) >= 2  # the virtual machine and its epmd
    until(lambda: not processes_of(folder))
    assert not folder.exists()
