"""A relay on each kind of store."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from reliablepub.outbox.entry import Store
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.relay.scripted import World, connected
from tests.stores import STORES, open_store, outbox_of

Build = Callable[..., World]
"""Builds a relay; its arguments are options of `World`."""
ABOUT_STORES = (
    "test_clock_steps",
    "test_loading",
    "test_ordering",
    "test_pauses",
    "test_withdrawal",
)
"""Modules whose subject is also what the store does."""


@pytest.hookimpl(tryfirst=True)  # before `-m "not soak"` is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The other modules meet PostgreSQL in the long form only: a database costs 0.1 s a test."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or item.path.parent != Path(__file__).parent:
            continue
        if callspec.params.get("store") == "postgres" and item.path.stem not in ABOUT_STORES:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = open_store(outbox_of(request.param, request, tmp_path))
    yield store
    store.close()


@pytest.fixture
def sqlite(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


@pytest.fixture
def world(store: Store) -> Build:
    """Build a relay on the store, connected and with an open channel."""
    return partial(connected, store)
