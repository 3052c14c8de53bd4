"""What users write code against changes only on purpose."""

import difflib
import re
import sys

from tests.packaging.public_api import PAGE, public_api, recorded


def test_the_public_api_is_the_recorded_one() -> None:
    before, now = recorded(), public_api()
    changes = [
        line
        for name in now
        for line in difflib.unified_diff(
            before.get(name, []), now[name], "recorded", "now", n=0, lineterm=""
        )
        if line.startswith(("+", "-"))
    ]
    hint = "if it is meant: python -m tests.packaging.public_api, and a line in the changelog"
    assert not changes, "\n".join([*changes, hint])


def test_the_record_has_every_module_of_the_api_page_and_the_spark_sink() -> None:
    """Where one of them cannot be imported, nothing is compared: the record shows what is."""
    parts = r"^::: (reliablepub\.(?:hooks|(?:integrations|observe)\.[a-z_]+))"
    shown = set(re.findall(parts, PAGE.read_text(), re.MULTILINE))
    assert len(shown) > 8, "the page is read"
    assert shown | {"reliablepub", "spark_sink"} <= set(recorded())
    if "pyspark" in sys.modules:
        assert set(public_api()) == set(recorded())
