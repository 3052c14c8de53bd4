"""Lines for `import` that were bent: each is refused by name, or becomes a row like any other."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reliablepub.message import Message
from reliablepub.outbox.admin.transfer import BadLine, _parsed, export_lines, import_lines
from reliablepub.outbox.entry import Attempt, Changes, Entry
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.rows import misfits
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.outcome import Outcome, OutcomeKind
from tests.fuzz.bending import bent
from tests.fuzz.bounds import bounded, for_long, short

Line = str


@cache
def samples() -> tuple[str, ...]:
    """Lines of an open and of a parked message."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "outbox.db"
        with closing(SqliteStore(path)) as store:
            entries = [
                Entry(
                    Message(
                        b"\x00body",
                        "é",
                        "k",
                        message_id=f"m{n}",
                        headers={"a": [1, {"b": b"c"}]},
                        ordering_key="o" if n else None,
                    ),
                    stored_at=5.0,
                )
                for n in range(2)
            ]
            store.commit(Changes(new=entries))
            ended = Attempt(entries[1], "1-1", 1, Outcome(OutcomeKind.NACKED, 0, ""), 9.0)
            store.commit(Changes(parked=[ended], attempts=[ended]))
        return tuple(export_lines(outbox_at(path), [1, 2]))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\ud800", "x" * 300, "\x00", "ready", "parked", "confirmed", "{}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
deep = st.builds(
    lambda opening, depth: opening * depth, st.sampled_from(["[", '{"a":']), st.integers(1, 20_000)
)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """A line with other values, or with other bytes."""
    line = draw(st.sampled_from(samples()))
    kind = draw(st.sampled_from(["values", "bytes", "deep", "properties"]))
    if kind == "deep":
        return str(draw(deep))
    if kind == "bytes":
        return draw(bent(line.encode())).decode(errors="surrogateescape")
    row: dict[str, Any] = json.loads(line)
    if kind == "properties":
        row["properties"] = draw(bent(str(row["properties"]).encode())).decode(errors="replace")
    else:
        for name in draw(st.lists(st.sampled_from(sorted(row)), max_size=3)):
            row[name] = draw(values)
    return json.dumps(row)


@pytest.fixture(scope="module")
def outbox() -> Iterator[Outbox]:
    with TemporaryDirectory() as folder, Outbox(Path(folder) / "new.db") as outbox:
        outbox.enqueue(Message(b"x"))
        yield outbox


def is_refused_or_a_row(outbox: Outbox, line: Line) -> None:
    row, words = None, ""
    with bounded(1 << 20 | 64 * len(line)):
        try:
            row = _parsed(line, 1)
        except BadLine as error:
            words = str(error)
    if row is None:
        assert words.startswith("line 1")
        return
    assert list(misfits(row)) == []
    for _ in import_lines(outbox_at(outbox.path), [line], f"{hash(line)}"):
        pass
    assert outbox.audit().is_right
    outbox.status()


def test_bent_lines(outbox: Outbox) -> None:
    short(given(lines())(lambda line: is_refused_or_a_row(outbox, line)))()


def test_the_lines_are_fine_to_begin_with(outbox: Outbox) -> None:
    for line in samples():
        assert _parsed(line, 1)["state"] in {"ready", "parked"}


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_bent_lines_for_long(outbox: Outbox) -> None:
    for_long(given(lines())(lambda line: is_refused_or_a_row(outbox, line)))
