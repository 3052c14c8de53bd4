"""What `doctor`, `check`, `status` and `watch` show, as plain data: words with a level, no markup.

Knows: names, words and levels. Must never know: where a fact comes from, or how it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """Severity of a finding or a fact."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


def warn_unless(is_fine: bool) -> Level:
    """Level ``ok`` if a fact is as it should be, else ``warning``."""
    return Level.OK if is_fine else Level.WARNING


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    about: str  # ``outbox``, ``client`` or ``broker``
    check: str
    level: Level
    found: str
    remedy: str  # empty if there is nothing to do


def finding(
    check: str, level: Level, found: str, remedy: str = "", *, about: str = "outbox"
) -> Finding:
    """A finding, about the outbox unless said otherwise; level ``ok`` needs no remedy."""
    return Finding(about, check, level, found, "" if level is Level.OK else remedy)


def unless(
    wrong: str, check: str, fine: str, remedy: str, *, level: Level = Level.WARNING
) -> Finding:
    """A finding about the outbox: what is wrong, at this level, or that nothing is."""
    return finding(check, level if wrong else Level.OK, wrong or fine, remedy)


class Fact(NamedTuple):
    """One line of a page."""

    name: str  # may be empty
    words: str
    level: Level | None = None  # None: it is neither good nor bad
    trend: Sequence[float] = ()  # earlier values, the newest last


class Page(NamedTuple):
    """All that is shown of an outbox, the most urgent first."""

    outbox: Fact
    relay: Fact
    advice: Fact  # what a person should do now
    sections: Mapping[str, Sequence[Fact]]  # by title
