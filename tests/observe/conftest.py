"""What is exposed, read as Prometheus reads it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from reliablepub.testing import FakeBroker
from tests.cli.conftest import cli, fake
from tests.waiting import until

__all__ = ["Scrape", "cli", "fake"]


class Scrape:
    """The samples of one registry, afresh with each look."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def all(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample; that none comes twice is checked."""
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in found
                found[key] = sample.value
        return found

    def __call__(self, name: str, **labels: str) -> float | None:
        """One value, without the prefix; the label ``outbox`` is ``o`` unless given."""
        wanted = frozenset({"outbox": "o", **labels}.items())
        return self.all().get((f"reliablepub_{name}", wanted))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry(auto_describe=True)


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Scrape:
    return Scrape(registry)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """With a queue `q`."""
    with FakeBroker() as broker:
        broker.declare_queue("q")
        yield broker


@pytest.fixture
def outbox(tmp_path: Path) -> Path:
    return tmp_path / "o.db"


@pytest.fixture
def becomes(scrape: Scrape) -> Callable[..., None]:
    """Wait until a sample has a value."""

    def wait(value: float | None, name: str, **labels: str) -> None:
        until(lambda: scrape(name, **labels) == value, 30)

    return wait
