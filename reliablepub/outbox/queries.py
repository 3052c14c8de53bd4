"""Reads the ``.sql`` files of the outbox, and finds their statements by name.

Knows: the convention ``-- name: xyz`` above a statement, which ends in ``;`` at the end of a line.
Must never know: which database runs a statement, or what it means.
"""

from __future__ import annotations

import pkgutil
import re
from typing import Final

_STEP: Final = re.compile(r"^-- From version (\d+)\.$", re.MULTILINE)
_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def text_of(package: str, name: str) -> str:
    """Return the text of a ``.sql`` file of a package."""
    # `pkgutil` reads from a zip too, and the imports of `importlib.resources` take 10 ms.
    data = pkgutil.get_data(package, name)
    assert data is not None, "every loader of packages has data"
    return data.decode()


def text_of_queries(
    package: str, *, bytes_of: str, utc_of: str, is_chosen: str, infinity: str
) -> str:
    """Return the statements that every database runs, and those of the database of a package."""
    # `INFINITY` is the due time of messages whose destination is paused.
    text = text_of(__package__, "queries.sql").replace("INFINITY", infinity)
    text += text_of(package, "queries.sql")
    # In each form, ``{}`` stands for the column. `CHOSEN`: whether it is in the list ``:chosen``.
    for word, form in (("BYTES", bytes_of), ("UTC", utc_of), ("CHOSEN", is_chosen)):
        text = re.sub(rf"\b{word}\(([\w.]+)\)", lambda found: form.format(found[1]), text)  # noqa: B023
    return text


def named(text: str) -> dict[str, str]:
    """Return the statements of a text by name, without comments and without the ``;``."""
    found: dict[str, str] = {}
    parts = _NAME.split(text)[1:]
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        statement, end, rest = _without_comments(part).partition(";\n")
        if not statement or not end or rest:
            raise ValueError(f"below the name {name} is not one whole statement")
        if name in found:
            raise ValueError(f"two statements are named {name}")
        found[name] = statement
    return found


def steps_of(package: str) -> dict[int, str]:
    """Return the steps of ``upgrade.sql``, by the version that each upgrades."""
    parts = _STEP.split(text_of(package, "upgrade.sql"))[1:]
    return {int(version): text for version, text in zip(parts[::2], parts[1::2], strict=True)}


def _without_comments(text: str) -> str:
    lines = (line for line in text.splitlines() if line and not line.startswith("--"))
    return "".join(f"{line}\n" for line in lines)
