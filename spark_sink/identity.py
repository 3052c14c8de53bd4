"""A `message_id` for each row; a replay of the row gets an equal one.

Knows: bytes, and digests. Must never know: Spark, brokers.

A task that Spark retries gets the same *set* of rows, but after a shuffle in another order: row 7
of the first attempt may be row 4711 of the second. An id made of the position would then name
another row, and a consumer that deduplicates would drop rows it has never seen. So the default id
is made of the content: a digest of all published values, of the partition, and of the identity of
the write, and the number of equal rows before this one in the task. Equal rows are interchangeable,
so it does not matter which of them is the first. All ids of one attempt differ, hence deduplication
never drops a row.

A key in the data itself (``idColumns``) is better: it does not change when the rows are split into
other partitions, and a task has no digests to remember.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final, Protocol

_DIGEST_BYTES: Final = 16


class Identity(Protocol):
    """Assigns ids to the rows of one task attempt."""

    def __call__(self, bodies: Iterable[bytes], rests: Iterable[tuple[object, ...]]) -> list[str]:
        """The ids of the next rows.

        Args:
            bodies: bodies of the messages.
            rests: all other published values of each row that differ from row to row; their `repr`
                must be complete and depend on the values alone.
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

    def __call__(self, bodies: Iterable[bytes], rests: Iterable[tuple[object, ...]]) -> list[str]:
        """A digest of each row; for repeated rows, with the number of equal rows before it."""
        ids = []
        start, seen = self._start, self._seen
        for body, rest in zip(bodies, rests, strict=True):
            row = start.copy()  # cheaper than a new keyed digest
            # The closing bracket of the tuple separates `rest` from the body, so no two rows give
            # the same bytes. ascii(), because what repr() escapes depends on Python's version of
            # Unicode.
            row.update(ascii(rest).encode())
            row.update(body)
            digest = row.digest()
            before = seen.get(digest, 0)
            seen[digest] = before + 1
            ids.append(f"{digest.hex()}-{before}" if before else digest.hex())
        return ids


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

    def __call__(self, keys: Iterable[tuple[object, ...]]) -> list[str]:
        """The ids of rows.

        Args:
            keys: the key values of each row: an int, str, bytes or bool for each column.
        """
        ids = []
        for key in keys:
            row = self._start.copy()
            row.update(ascii(key).encode())
            ids.append(row.hexdigest())
        return ids


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

    def __call__(self, bodies: Iterable[bytes], rests: Iterable[tuple[object, ...]]) -> list[str]:
        """The ids of the next positions."""
        del rests
        first = self._rows
        self._rows += len(list(bodies))
        return [f"{self._scope}-{row}" for row in range(first, self._rows)]
