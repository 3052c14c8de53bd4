"""The pytest plugin: fixtures with a fake broker.

Knows: pytest, `FakeBroker`. Must never know: the inside of the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliablepub.testing.broker import FakeBroker
    from reliablepub.testing.options import NodeOptions

# The fixtures import late, as `reliablepub.testing` does: every pytest run loads the plugin, and
# few runs need a broker. Also, coverage measures only modules that are imported after its start.


@pytest.fixture
def fake_broker_options() -> NodeOptions:
    """Settings of `fake_broker`; override this fixture for users, limits or a seed."""
    from reliablepub.testing.options import NodeOptions  # noqa: PLC0415

    return NodeOptions()


@pytest.fixture
def fake_broker(fake_broker_options: NodeOptions) -> Iterator[FakeBroker]:
    """A running, empty `FakeBroker` on a free port."""
    from reliablepub.testing.broker import FakeBroker  # noqa: PLC0415

    with FakeBroker(options=fake_broker_options) as broker:
        yield broker
