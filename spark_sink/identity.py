"""A `message_id` for each row: the same whenever, wherever and in whatever order it is replayed.

Knows: bytes, and digests. Must never know: Spark, brokers.

A task that Spark tries again gets the same *set* of rows, but after a shuffle in another order:
what was row 7 is row 4711 now. An id made of the position would then name another row, and a
consumer that deduplicates would drop rows it has never seen. So an id is made of what a row *is*: a
digest of everything that is published, of the partition, and of an identity of the write; and of
how many equal rows came before it in the same task. Equal rows are equal, so it does not matter
which of them is called the first. Within one attempt all ids are different, hence deduplication
never drops a row.

Where the data has a key of its own, that is the better name: it does not change when the rows are
split into other partitions, and nothing needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol

_DIGEST_BYTES: Final = 16


class Identity(Protocol):
    """Gives each row of one attempt of a task its id."""

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """The id of the next row.

        Args:
            body: of the message.
            rest: all else that is published and differs from row to row; its `repr` must say it
                all, and depend on nothing else.
        """


class ByContent:
    """The safe way. Holds a digest of every different row of the task, about 100 bytes each.

    Args:
        write: identity of the write, the same on every attempt.
        partition: number of the partition; equal rows of two partitions are two messages.
        constant: what is published with every row, and not in it.
    """

    def __init__(self, write: str, partition: int, constant: object = None) -> None:
        scope = ascii((write, partition, constant)).encode()
        key = blake2b(scope, digest_size=_DIGEST_BYTES).digest()
        self._start = blake2b(digest_size=_DIGEST_BYTES, key=key)
        self._seen: dict[bytes, int] = {}

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """A digest of the row; from the second of equal rows on, with its number among them."""
        # In brackets, it ends where it ends: no other row gives the same bytes. ascii, because what
        # repr escapes changes with Python's version of Unicode.
        row = self._start.copy()  # in less time than it takes to begin with the key
        row.update(ascii(rest).encode())
        row.update(body)
        digest = row.digest()
        before = self._seen.get(digest, 0)
        self._seen[digest] = before + 1
        return f"{digest.hex()}-{before}" if before else digest.hex()


class ByColumns:
    """By the columns that name a row in the data itself: a digest of their typed values.

    It depends on nothing else, neither on the write nor on how Spark splits it, and remembers
    nothing. Rows of one key are one message, for whoever deduplicates.

    Args:
        columns: name and kind of each.
    """

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        key = blake2b(ascii(tuple(columns)).encode(), digest_size=_DIGEST_BYTES).digest()
        self._start = blake2b(digest_size=_DIGEST_BYTES, key=key)

    def __call__(self, key: tuple[object, ...]) -> str:
        """The id of a row.

        Args:
            key: a value for each column; whole numbers, texts, bytes or booleans.
        """
        row = self._start.copy()
        row.update(ascii(key).encode())
        return row.hexdigest()


class ByPosition:
    """By the number of the row. Only for rows that come in one order, such as sorted ones.

    Args:
        write: as for `ByContent`.
        partition: likewise.
        constant: likewise.
    """

    def __init__(self, write: str, partition: int, constant: object = None) -> None:
        scope = ascii((write, partition, constant)).encode()
        self._scope = blake2b(scope, digest_size=_DIGEST_BYTES).hexdigest()
        self._rows = 0

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """The next number."""
        del body, rest
        self._rows += 1
        return f"{self._scope}-{self._rows - 1}"
