"""Which versions of other projects the claims are about: one table says so, and every line has one.

Knows: the tables of docs/comparison.md and of the README. Must never know: whether a claim is true.
"""

import re
from pathlib import Path

from tests.docs.documents import DOCUMENTS, README, ROOT

PAGE = ROOT / "docs" / "comparison.md"
BENCHES = {
    ROOT / "docs" / name for name in ("client-conformance.md", "performance.md", "support.md")
}
"""Pages that are made by programs, or that give the conditions of a measurement."""


def rows(text: str) -> list[list[str]]:
    """The cells of each row of its tables, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and line[2] != "|"]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def name_of(row: list[str]) -> str:
    """Of the project: "Celery, on kombu" and "Celery (on kombu)" are claims about Celery."""
    return re.split(r", | \(", row[0].strip("*"))[0]


def section(page: Path, title: str) -> str:
    return page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


READ = {name_of(row): row for row in rows(section(PAGE, "Versions read"))}


def test_every_line_has_a_version_and_a_source() -> None:
    page = PAGE.read_text().replace(section(PAGE, "Versions read"), "")
    compared = [*rows(page), *rows(section(README, "Compared with others"))]
    names = {name_of(row) for row in compared} - {"reliablepub"}
    assert len(names) > 15, "the tables are read"
    assert names <= set(READ)
    assert [name for name in READ if name not in page and name not in README.read_text()] == []
    for row in READ.values():
        assert len(row) == 4
        assert all(row), row


def test_a_version_of_another_project_is_told_in_one_place() -> None:
    """So that it is changed together with what was read. A requirement, "or later", is none.

    The README may repeat it, as it is there.
    """
    named = "|".join(re.escape(name) for name in READ)
    told = re.compile(rf"\b(?:{named})[`) (]*v?\d+\.\d[\d.]*+(?! or later)", re.IGNORECASE)
    assert told.search("kombu (Celery) 5.7.0"), "it finds one"
    for page in set(DOCUMENTS) - BENCHES:
        text = page.read_text()
        if page == PAGE:
            text = text.replace(section(PAGE, "Versions read"), "")
        found = [one.rpartition(" ") for one in told.findall(text)]
        if page == README:
            found = [one for one in found if one[2] not in READ[one[0]][1].split(", ")]
        assert found == [], page.name


def test_a_measured_version_is_that_of_the_measurement() -> None:
    measured = {name: row for name, row in READ.items() if row[2] == "measured"}
    assert len(measured) > 3, "the table is read"
    for name, (_, versions, _, where) in measured.items():
        link = re.search(r"\]\(([\w-]+\.md)#", where)
        assert link is not None, name
        page = (ROOT / "docs" / link[1]).read_text().lower()
        for version in versions.split(", "):
            assert f"{name.lower()} {version}" in page, name
