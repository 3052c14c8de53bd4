"""What users write code against changes only on purpose."""

import difflib

from tests.packaging.public_api import RECORD, public_api


def test_the_public_api_is_the_recorded_one() -> None:
    recorded, now = RECORD.read_text().splitlines(), public_api().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(recorded, now, "recorded", "now", n=0, lineterm="")
        if line.startswith(("+", "-"))
    ]
    hint = "if it is meant: python -m tests.packaging.public_api, and a line in the changelog"
    assert not changes, "\n".join([*changes, hint])
