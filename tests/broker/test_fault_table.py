"""The page that lists the faults lists all of them, with their fields."""

import dataclasses
import re
from pathlib import Path

import pytest

from reliablepub.testing import faults

PAGE = Path(__file__).parents[2] / "docs" / "fake-broker.md"
BASES = (faults.PublishFault, faults.DeliveryFault, faults.ConnectionFault)
FAULTS = PAGE.read_text().partition("### At a publish")[2].partition("## Where it differs")[0]
LISTS = re.findall(
    r"^<!-- the site shows a table of these faults: \w+ -->\n((?:.+\n)+)", FAULTS, re.MULTILINE
)
KIND = re.compile(r"`(?P<kind>[a-z_]+)`(?:\s\((?P<fields>[^)]*)\))?")
ROWS = {
    found["kind"]: set(re.findall(r"`([a-z_]+)`", found["fields"] or ""))
    for each in LISTS
    for found in KIND.finditer(each)
}


def names(kind: type[faults.Fault]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", sorted(faults.KINDS))
def test_a_fault_has_its_row(name: str) -> None:
    kind = faults.KINDS[name]
    (base,) = (base for base in BASES if issubclass(kind, base))
    assert names(kind) - names(base) == ROWS[name]


def test_no_row_is_without_its_fault() -> None:
    assert ROWS.keys() <= faults.KINDS.keys()


def test_the_toml_of_the_page_can_be_loaded(tmp_path: Path) -> None:
    shown = re.findall(r"```toml\n(.*?)```", FAULTS, re.DOTALL)
    assert shown
    for number, text in enumerate(shown):
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        assert len(faults.load_faults(path)) == 3
