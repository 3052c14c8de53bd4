"""Passes over the history, which find what was kept for long enough, a page at a time.

Knows: the tables of the history, and how often to read them. Must never know: which database reads
or deletes a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

PAGE: Final = 500
"""Rows of the history that one look reads, and one transaction deletes."""
PASS_S: Final = 3_600.0
"""Seconds from one pass over the history to the next."""

PageOf: TypeAlias = Callable[[str, dict[str, Any]], tuple[int | None, float]]
"""Runs a statement ``page_of_...``: the last number of a page, and its earliest time."""


@dataclass(slots=True)
class _Pass:
    """One pass after the other over a table."""

    first: int = 0  # the number to look at next
    not_before: float = 0.0  # when to do so (monotonic)


class Passes:
    """One pass after the other over each table of the history."""

    def __init__(self) -> None:
        self._passes = {"attempts": _Pass(), "interventions": _Pass()}

    def old(self, page_of: PageOf, before: float, monotonic: float) -> dict[str, dict[str, Any]]:
        """Return values of ``forget_..._between`` by table: the next page with rows to forget.

        A page is returned until it is `deleted`. Pages without such rows are passed.
        """
        found = {}
        for kind, pass_ in self._passes.items():
            if monotonic < pass_.not_before:
                continue
            last, oldest = page_of(f"page_of_{kind}", {"first": pass_.first, "limit": PAGE})
            if last is None:
                pass_.first, pass_.not_before = 0, monotonic + PASS_S
            elif isinstance(oldest, int | float) and oldest < before:  # not text, by a flipped bit
                found[kind] = {"first": pass_.first, "last": last, "before": before}
            else:
                pass_.first = last + 1
        return found

    def deleted(self, found: dict[str, dict[str, Any]]) -> None:
        """Go on after these pages."""
        for kind, values in found.items():
            self._passes[kind].first = values["last"] + 1
