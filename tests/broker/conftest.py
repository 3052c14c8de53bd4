"""What the tests of the fake broker share."""

import pytest

from reliablepub.testing.node import Node
from reliablepub.testing.plugin import fake_broker
from tests.broker.sans_io import Client, node_with_queue

__all__ = ["fake_broker"]


@pytest.fixture
def node() -> Node:
    return node_with_queue()


@pytest.fixture
def client(node: Node) -> Client:
    return Client(node).open()
