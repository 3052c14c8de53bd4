"""What may stand in the columns beside a message: one check for every door that rows come in by.

Knows: the range of each time, count and code that this library writes. Must never know: where a row
comes from, or the message in it.

The checksum covers what was accepted, and not the bookkeeping, which changes. So these columns can
hold anything in a file that was damaged or made up, and one size of 2^63-1 would make each sum over
them fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from reliablepub.message import BODY_BYTES_MAX, HEADER_BYTES_MAX
from reliablepub.outcome import OutcomeKind

TIME_MAX: Final = 3e11
"""Seconds since 1970, after the year 9999: where the calendar of `not_before` ends."""
COUNT_MAX: Final = 2**31 - 1
ID_MAX: Final = 2**62
SIZE_MAX: Final = BODY_BYTES_MAX + HEADER_BYTES_MAX + 4_096
REPLY_TEXT_MAX: Final = 10_000
_REPLY_CODE_MAX: Final = 65_535
_CHECKSUM_MAX: Final = 2**32 - 1
_OUTCOMES: Final = frozenset({*(kind.value for kind in OutcomeKind), "withdrawn"})


def misfits(row: Mapping[str, object]) -> Iterator[str]:
    """Columns of a row whose values this library never writes; columns that it lacks are fine."""
    for name, fits in _FITS.items():
        if name in row and not fits(row[name]):
            yield name


def are_counts(nacked: int, returned: int, refused: int, uncertain: int) -> bool:
    """Whether these can be numbers of attempts."""
    return 0 <= nacked | returned | refused | uncertain <= COUNT_MAX


def are_times(
    stored_at: float, due_at: float | None, expires_at: float | None, refused_at: float | None
) -> bool:
    """Whether these can be the times of a message."""
    return (
        is_time(stored_at)
        and (due_at is None or is_due_time(due_at))
        and (expires_at is None or is_time(expires_at))
        and (refused_at is None or is_time(refused_at))
    )


def is_due_time(value: object) -> bool:
    """Whether a message can be due then; an infinite time is that of a pause."""
    return is_time(value) or value == math.inf


def is_size(value: int) -> bool:
    """Whether it can be the `Message.size` of a message."""
    return 0 <= value <= SIZE_MAX


def misfit_words(row: Mapping[str, object]) -> str:
    """What is wrong with such a row, for people."""
    found = ", ".join(f"{name} {row[name]!r:.40}" for name in misfits(row))
    return f"{found}: none that this library writes; the file was damaged or edited"


def is_time(value: object) -> bool:
    """Whether it can be a wall clock's time, in seconds since 1970."""
    return type(value) in (int, float) and 0 <= value <= TIME_MAX  # type: ignore[operator]


def _whole(most: int, least: int = 0) -> Callable[[object], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


def _is_reply_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= REPLY_TEXT_MAX and _is_encodable(value)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FITS: Final[dict[str, Callable[[object], bool]]] = {
    "id": _whole(ID_MAX, 1),
    "stored_at": is_time,
    "due_at": _or_none(is_due_time),
    "expires_at": _or_none(is_time),
    "refused_at": _or_none(is_time),
    "parked_at": _or_none(is_time),
    "nacked": _whole(COUNT_MAX),
    "returned": _whole(COUNT_MAX),
    "refused": _whole(COUNT_MAX),
    "uncertain": _whole(COUNT_MAX),
    "size": _whole(SIZE_MAX),
    "checksum": _whole(_CHECKSUM_MAX),
    "outcome": _or_none(lambda value: isinstance(value, str) and value in _OUTCOMES),
    "reply_code": _or_none(_whole(_REPLY_CODE_MAX)),
    "reply_text": _or_none(_is_reply_text),
    "is_skipped": _whole(1),
}
