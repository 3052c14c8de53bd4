"""The views row by row: each row once, in order, however many pieces they come in."""

from pathlib import Path

import pytest

from reliablepub import Message, Outbox
from reliablepub.errors import ConfigurationError, NotAnOutbox
from reliablepub.outbox.admin import inspection
from reliablepub.outbox.admin.inspection import VIEWS, read_span, read_view
from reliablepub.outbox.entry import Attempt, Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make
from tests.outcomes import RETURNED
from tests.stores import Where


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_every_row_comes_once_and_in_order(
    store: SqliteStore, path: Path, entry: Make, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PIECE_ROWS", 3)
    store.commit(Changes(new=[entry() for _ in range(count)]))
    found = list(read_view(outbox_at(path), "open"))
    assert [(row["id"], row["message_id"]) for row in found] == [
        (n, f"m-{n}") for n in range(1, count + 1)
    ]


def test_ranges_of_numbers_add_up_to_the_view(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PIECE_ROWS", 2)
    outbox = Outbox(where)
    outbox.create()
    assert outbox.span("open") is None
    for n in range(7):
        outbox.enqueue(Message(b"", "e", message_id=f"m-{n}"))
    whole = list(outbox.rows("open"))
    assert outbox.span("open") == (whole[0]["id"], whole[-1]["id"])
    middle = int(str(whole[3]["id"]))
    parts = [outbox.rows("open", last=middle), outbox.rows("open", middle + 1)]
    assert [row for part in parts for row in part] == whole
    assert [row["id"] for row in outbox.rows("open", middle, middle)] == [middle]
    assert list(outbox.rows("open", middle, middle - 1)) == list(outbox.rows("open", last=0)) == []
    for view in VIEWS[1:]:
        assert outbox.span(view) is None, view
    outbox.close()


def test_pieces_are_looks_of_their_own(
    store: SqliteStore, path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PIECE_ROWS", 2)
    store.commit(Changes(new=[entry(), entry()]))
    rows = read_view(outbox_at(path), "open")
    assert next(rows)["id"] == 1
    store.commit(Changes(new=[entry()]))
    assert [row["id"] for row in rows] == [2, 3], "stored meanwhile"


def test_each_view_has_rows(
    store: SqliteStore, path: Path, entry: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "PIECE_ROWS", 1)
    store.commit(Changes(new=[one := entry(), entry()]))
    parked = [Attempt(one, "1-1", 1, RETURNED, 5.0)]
    store.commit(Changes(parked=parked, attempts=parked))
    counts = {view: len(list(read_view(outbox_at(path), view))) for view in VIEWS}
    given_up = {"parked": 1, "history": 1, "confirmed": 0, "interventions": 0}
    assert counts == {"open": 1, **given_up, "audit": 1}
    (audit,) = read_view(outbox_at(path), "audit")
    assert audit["stored"] == 2
    spans = {view: read_span(outbox_at(path), view) for view in VIEWS}
    there = {"open": (2, 2), "parked": (1, 1), "history": (1, 1)}
    assert spans == dict.fromkeys(VIEWS) | there


def test_what_there_is_not_cannot_be_read(path: Path) -> None:
    with pytest.raises(NotAnOutbox):
        next(read_view(outbox_at(path), "open"))
    words = "there is no view 'ready'; there are open, parked, confirmed, history, interventions,"
    with pytest.raises(ConfigurationError, match=words):
        next(read_view(outbox_at(path), "ready"))
    with pytest.raises(ConfigurationError, match=words):
        read_span(outbox_at(path), "ready")
