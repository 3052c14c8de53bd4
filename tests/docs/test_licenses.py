"""docs/licenses.md lists what an installation brings."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.documents import ROOT
from tests.docs.licenses import EXTRAS, PAGE, page


def test_every_dependency_of_ours_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [*project["dependencies"]]
    for extra in EXTRAS[1:]:
        ours += project["optional-dependencies"][extra]
    names = {canonicalize_name(Requirement(text).name) for text in ours}
    text = PAGE.read_text()
    missing = {name for name in names if f"\n| {name} |" not in text}
    assert missing == set(), "python -m tests.docs.licenses"


@pytest.mark.soak  # not at every run: a release of somebody's may change it
def test_the_page_is_what_the_metadata_says() -> None:
    assert PAGE.read_text() == page()
