"""A `message_id` for each row, which every replay of the row repeats.

Knows: bytes, and digests. Must never know: Spark, brokers.

A task that Spark retries gets the same *set* of rows, but after a shuffle in another order: row 7
of the first attempt may be row 4711 of the second. An id made of the position would then name
another row, and a consumer that deduplicates would drop rows it has never seen. So the default id
is made of the content: a digest of everything that is published, of the partition, and of the
identity of the write, and the number of equal rows before this one in the task. Equal rows are
interchangeable, so it does not matter which of them is the first. All ids of one attempt differ,
hence deduplication never drops a row.

A key in the data itself (``idColumns``) is better: it does not change when the rows are split into
other partitions, and a task has no digests to remember.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Protocol

_DIGEST_BYTES: Final = 16


class Identity(Protocol):
    """Gives each row of one task attempt its id."""

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """The id of the next row.

        Args:
            body: of the message.
            rest: all other published values that differ from row to row; their `repr` must be
                complete and depend on the values alone.
        """


class ByContent:
    """Ids by content, safe in any order. Holds a digest of each distinct row, about 100 bytes each.

    Args:
        write: identity of the write, equal in every attempt.
        partition: number of the partition; equal rows of two partitions are two messages.
        constant: values that are published with every row and come from options.
    """

    def __init__(self, write: str, partition: int, constant: object = None) -> None:
        scope = ascii((write, partition, constant)).encode()
        key = blake2b(scope, digest_size=_DIGEST_BYTES).digest()
        self._start = blake2b(digest_size=_DIGEST_BYTES, key=key)
        self._seen: dict[bytes, int] = {}

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """A digest of the row; for repeated rows, with the number of equal rows before it."""
        # The closing bracket of the tuple separates `rest` from the body, so no two rows give the
        # same bytes. ascii(), because what repr() escapes depends on Python's version of Unicode.
        row = self._start.copy()  # cheaper than a new keyed digest
        row.update(ascii(rest).encode())
        row.update(body)
        digest = row.digest()
        before = self._seen.get(digest, 0)
        self._seen[digest] = before + 1
        return f"{digest.hex()}-{before}" if before else digest.hex()


class ByColumns:
    """Ids by the key columns of the data: a digest of their typed values.

    An id depends on these values alone, neither on the write nor on the partitions, and needs no
    memory. Rows with equal keys have one id: a consumer that deduplicates keeps one of them.

    Args:
        columns: name and kind of each.
    """

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        key = blake2b(ascii(tuple(columns)).encode(), digest_size=_DIGEST_BYTES).digest()
        self._start = blake2b(digest_size=_DIGEST_BYTES, key=key)

    def __call__(self, key: tuple[object, ...]) -> str:
        """The id of a row.

        Args:
            key: a value for each column: an int, str, bytes or bool.
        """
        row = self._start.copy()
        row.update(ascii(key).encode())
        return row.hexdigest()


class ByPosition:
    """Ids by the number of the row. Only for rows whose order never changes, such as sorted ones.

    Args:
        write: identity of the write, equal in every attempt.
        partition: number of the partition.
        constant: values that are published with every row and come from options.
    """

    def __init__(self, write: str, partition: int, constant: object = None) -> None:
        scope = ascii((write, partition, constant)).encode()
        self._scope = blake2b(scope, digest_size=_DIGEST_BYTES).hexdigest()
        self._rows = 0

    def __call__(self, body: bytes, rest: tuple[object, ...]) -> str:
        """The id of the next position."""
        del body, rest
        self._rows += 1
        return f"{self._scope}-{self._rows - 1}"
