"""Checks the status that a relay shows to other processes: anyone who may write there can forge it.

Knows: the fields of a status and their types. Must never know: what a status says, where it is.

`relay/status.py` makes what is checked here. A reader may then use each field that is there without
a look at its type. Fields that are not known are those of another version, and fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

Fits: TypeAlias = Callable[[Any], bool]

_NUMBER_MAX: Final = 2**53
"""Also rules out infinity, not-a-number, and integers of any length."""


NO_FIELDS: Final[Mapping[str, Fits]] = {}


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < _NUMBER_MAX  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _or_none(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _each(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _row(fields: Mapping[str, Fits], later: Mapping[str, Fits] = NO_FIELDS) -> Fits:
    """Whether it is a dictionary with these fields; those of `later` may be left out."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and fits(value[name]) for name, fits in fields.items())
        and all(fits(value[name]) for name, fits in later.items() if name in value)
    )


_PAUSED: Final = {
    **dict.fromkeys(("exchange", "reason"), _is_text),
    "routing_key": _or_none(_is_text),
    **dict.fromkeys(("since", "probe_in_s", "waiting"), _is_number),
}
_LATENCY: Final = dict.fromkeys(("confirms", "p50_s", "p95_s", "p99_s", "max_s"), _is_number)
FIELDS: Final[Mapping[str, Fits]] = {
    **dict.fromkeys(("link", "reason", "server", "hooks_off", "trying"), _is_text),
    **dict.fromkeys(("at", "since", "in_flight", "window", "buffered", "aside"), _is_number),
    **dict.fromkeys(("connects", "violations", "stale", "paused_destinations"), _is_number),
    "latency": _or_none(_row(_LATENCY)),
    "rate_max": _or_none(_is_number),
    "lasts": _row({}, dict.fromkeys(("nacked", "returned"), _is_number)),
    "paused": _each(_row(_PAUSED, {"gives_up_at": _or_none(_is_number)})),
}
"""The fields of a status, and whether a value fits."""


def is_status(value: object) -> bool:
    """Whether it can be the status of a relay; an earlier version may have fewer fields."""
    return isinstance(value, dict) and all(
        fits(value[name]) for name, fits in FIELDS.items() if name in value
    )
