"""What consumers read of each type of header: the table of docs/consumers.md.

python -m tests.clients.test_headers      # writes the table anew
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pamqp.decode
import pika.data
from amqp.serialization import loads

from reliablepub import Message
from reliablepub.transport.frames import encode_properties

PAGE: Final = Path(__file__).parents[2] / "docs" / "consumers.md"
HEAD: Final = "| a header of | is sent as | pika | aio-pika (pamqp) | kombu, Celery (py-amqp) |\n"
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "`str`": ("é",),
    "`bool`": (True,),
    "`int` of 32 bits": (2**31 - 1, -300),
    "`int` of 64 bits": (2**40, -(2**40)),
    "`float`": (0.1, 2.5),
    "`Decimal`": (Decimal("1.50"),),
    "a negative `Decimal`": (Decimal("-1.5"),),
    "`bytes`": (b"\xff\x00",),
    "`datetime`": (datetime(2026, 11, 29, 12, tzinfo=UTC),),
    "`None`": (None,),
    "`list`": ([1, "a"],),
    "`dict`": ({"k": 1},),
}
TYPES: Final = {
    "S": "long string",
    "t": "boolean",
    "I": "32-bit integer",
    "l": "64-bit integer",
    "d": "double",
    "D": "decimal",
    "x": "byte array",
    "T": "timestamp",
    "V": "void",
    "A": "array",
    "F": "table",
}
"""RabbitMQ's types of fields (rabbit_binary_parser)."""


def with_pika(table: bytes) -> Any:
    return pika.data.decode_table(table, 0)[0]["x"]


def with_pamqp(table: bytes) -> Any:
    return pamqp.decode.field_table(table)[1]["x"]


def with_py_amqp(table: bytes) -> Any:
    return loads("F", table, 0)[0][0]["x"]


def read(decode: Callable[[bytes], Any], table: bytes, sent: Any) -> str:
    """What a library reads, in words."""
    found = decode(table)
    if found == sent or (isinstance(found, datetime) and found.replace(tzinfo=UTC) == sent):
        kind = type(sent).__mro__[-2] if sent is not None else type(None)
        if isinstance(sent, datetime) and found.tzinfo is None:
            return "the same, without a time zone"
        return "the same" if isinstance(found, kind) else f"the same, as `{type(found).__name__}`"
    return f"**`{found!r}`** for `{sent!r}`"


def rows() -> Iterator[str]:
    for name, values in VALUES.items():
        cells: list[list[str]] = []
        for value in values:
            message = Message(b"", routing_key="q", headers={"x": value})
            # Behind the flags and the length of the table: the name, and the type of the value.
            table = encode_properties(message, 1)[2:]
            sent = message.headers["x"] if message.headers else None
            assert table[4:6] == b"\x01x"
            libraries = (with_pika, with_pamqp, with_py_amqp)
            cells.append([TYPES[chr(table[6])], *(read(one, table, sent) for one in libraries)])
        last = cells[-1]
        assert all(row[0] == last[0] for row in cells), name
        shown = [", ".join(dict.fromkeys(column)) for column in zip(*cells, strict=True)]
        yield f"| {name} | {' | '.join(shown)} |\n"


def table() -> str:
    return HEAD + "|---|---|---|---|---|\n" + "".join(rows())


def test_the_table_says_what_each_client_reads() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python -m tests.clients.test_headers"


if __name__ == "__main__":
    before, _, old = PAGE.read_text(encoding="utf-8").partition(HEAD)
    PAGE.write_text(before + table() + "\n" + old.partition("\n\n")[2], encoding="utf-8")
