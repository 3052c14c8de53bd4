"""The page on observing names metrics that exist, as Prometheus writes them."""

import re
from pathlib import Path

from reliablepub.observe.catalogue import CATALOGUE

PAGE = Path(__file__).parents[2] / "docs" / "observing.md"


def test_every_metric_that_the_page_names_is_in_the_catalogue() -> None:
    """The site adds the whole catalogue."""
    named = set(re.findall(r"`(reliablepub_[a-z_]+)`", PAGE.read_text()))
    assert len(named) > 5
    assert named <= {metric.name for metric in CATALOGUE} | {"reliablepub_outbox"}


def test_names_follow_prometheus() -> None:
    for metric in CATALOGUE:
        assert re.fullmatch(r"reliablepub(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.means.endswith(".")
