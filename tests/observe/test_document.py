"""The page on observing says what there is, and all of it."""

import re
from pathlib import Path

from reliablepub.observe.catalogue import CATALOGUE, Metric

PAGE = Path(__file__).parents[2] / "docs" / "observing.md"


def row(metric: Metric) -> str:
    name = f"`{metric.name}`"
    if metric.label:
        values = ", ".join(f"`{value}`" for value in metric.values)
        name = f"{name} by `{metric.label}`" + (f": {values}" if values else "")
    return f"| {name} | {metric.type} | {metric.means} |"


def test_the_table_of_metrics_is_the_catalogue() -> None:
    shown = re.findall(r"^\| `reliablepub_.*$", PAGE.read_text(), re.MULTILINE)
    assert shown == [row(metric) for metric in CATALOGUE]


def test_names_follow_prometheus() -> None:
    for metric in CATALOGUE:
        assert re.fullmatch(r"reliablepub(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert metric.means.endswith(".")
