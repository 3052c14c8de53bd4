"""A relay on each kind of store."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reliablepub.outbox.entry import Store
from reliablepub.outbox.memory import MemoryStore
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.relay.scripted import World


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, path: Path) -> Iterator[Store]:
    store = SqliteStore(path) if request.param == "sqlite" else MemoryStore()
    yield store
    store.close()


@pytest.fixture
def sqlite(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path)
    yield store
    store.close()


@pytest.fixture
def world(store: Store) -> Callable[..., World]:
    """Build a relay on the store, connected and with an open channel."""

    def build(**options: Any) -> World:
        world = World(store, **options)
        world.connect()
        return world

    return build
