"""Arrays for the statements of a turn: one statement takes any number of rows, an array a column.

Knows: the names of the values in ``queries.sql``. Must never know: connections, turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from reliablepub.message import Message

COUNTS: Final = ("nackeds", "returneds", "refuseds", "uncertains")
PLAIN: Final = (
    *("ids", "message_ids", "exchanges", "routing_keys", "properties"),
    *("stored_ats", "sizes", "checksums", "bodies"),
)
"""Names of the values of ``insert_plain_messages``, whose rows `plain_row_of` returns."""
ENQUEUED: Final = (*PLAIN, "due_ats", "expires_ats", "ordering_keys")
"""Names of the values of ``enqueue_many``."""
FULL: Final = (*PLAIN, "due_ats", *COUNTS, "expires_ats", "ordering_keys", "refused_ats")
"""Names of the values of ``insert_messages``, whose rows `row_of` returns."""
ATTEMPT: Final = (
    *("ids", "message_ids", "ats", "epochs", "tags"),
    *("outcomes", "reply_codes", "reply_texts", "persistences"),
)
"""Names of the values of ``insert_attempts``, whose rows `attempt_of` returns."""
SCHEDULE: Final = ("due_ats", *COUNTS, "refused_ats", "ids")
"""Names of the values of ``reschedule``, whose rows `schedule_of` returns."""
GIVEN_UP: Final = ("ats", "states", "outcomes", "reply_codes", "reply_texts", *COUNTS, "ids")
"""Names of the values of ``park_messages``, whose rows `given_up_of` returns."""
TAGS: Final = ("epochs", "first_tags")
"""Names of the values of ``delete_in_flight``, whose rows `tags_of` returns."""
SENT: Final = (*TAGS, "counts", "ids")
"""Names of the values of ``insert_in_flight``, whose rows `in_flight_of` returns."""
_TIMES: Final = {"stored_ats", "due_ats", "expires_ats", "refused_ats", "ats"}


def arrays(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the values of rows as one array for each name."""
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    for name in _TIMES & columns.keys():  # psycopg requires one type for all numbers of an array
        columns[name] = [None if at is None else float(at) for at in columns[name]]
    if texts := columns.get("reply_texts"):  # the broker's, in which U+0000 may occur
        columns["reply_texts"] = [text.replace("\0", "\ufffd") for text in texts]
    return columns


def texts_of(message: Message) -> dict[str, object]:
    """Return the texts of a message that have columns of their own, by column."""
    return {
        "message_id": message.message_id,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "ordering_key": message.ordering_key,
    }
