"""The pytest plugin: a fake broker for each test that asks for one.

This module knows pytest and `FakeBroker`, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reliablepub.testing.broker import FakeBroker


@pytest.fixture
def fake_broker() -> Iterator[FakeBroker]:
    """A running `FakeBroker`, empty, on a port of its own."""
    # Imported late: every pytest run loads plugins, few need a broker, and coverage measures
    # only what is imported after it started.
    from reliablepub.testing.broker import FakeBroker  # noqa: PLC0415

    with FakeBroker() as broker:
        yield broker
