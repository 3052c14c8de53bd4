"""The pytest plugin: a fake broker for each test that asks for one.

This module knows pytest and `FakeBroker`, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliablepub.testing.broker import FakeBroker
    from reliablepub.testing.options import NodeOptions

# Imported late below: every pytest run loads plugins, few need a broker, and coverage measures only
# what is imported after it started.


@pytest.fixture
def fake_broker_options() -> NodeOptions:
    """What `fake_broker` is told before it starts; override it for users, limits or a seed."""
    from reliablepub.testing.options import NodeOptions  # noqa: PLC0415

    return NodeOptions()


@pytest.fixture
def fake_broker(fake_broker_options: NodeOptions) -> Iterator[FakeBroker]:
    """A running `FakeBroker`, empty, on a port of its own."""
    from reliablepub.testing.broker import FakeBroker  # noqa: PLC0415

    with FakeBroker(options=fake_broker_options) as broker:
        yield broker
