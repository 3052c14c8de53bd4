"""How long a caller waits: one check of every ``timeout_s``.

Knows: numbers. Must never know: what the caller waits for, or a clock.
"""

from __future__ import annotations

from math import isnan
from typing import TypeGuard

from reliablepub.errors import ConfigurationError


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float can be, and not nan."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not isnan(value)
    except OverflowError:
        return False


def seconds_of(timeout_s: float | None) -> float | None:
    """Return the time to wait. A negative one is 0: callers compute it as a deadline minus now."""
    if timeout_s is None:  # no limit
        return None
    if not is_number(timeout_s):
        msg = f"timeout_s is {timeout_s!r:.80}; it must be a number of seconds, or None"
        raise ConfigurationError(msg)
    return max(0.0, timeout_s)
