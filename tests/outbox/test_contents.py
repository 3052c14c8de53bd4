"""What is in a message is shown as text only if it is text."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from reliablepub.outbox.admin.inspection import Contents, read_contents
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.outbox.conftest import Make
from tests.sqlite import sql


@pytest.mark.parametrize(
    ("properties", "body", "text"),
    [
        ({}, b"plain\n\r\tlines", "plain\n\r\tlines"),
        ({}, "né".encode(), "né"),
        ({}, b"", ""),
        ({}, b"\x00", None),
        ({}, b"\xff", None),
        ({"content_type": "text/x-log"}, b"x", "x"),
        ({"content_type": "text/plain"}, b"a\x1bb", None),
        ({"content_type": "application/json; charset=utf-8"}, b"{}", "{}"),
        ({"content_type": "application/atom+xml"}, b"<a/>", "<a/>"),
        ({"content_type": "application/x-www-form-urlencoded"}, b"a=1", "a=1"),
        ({"content_type": "application/octet-stream"}, b"abc", None),
        ({"content_type": "image/text/"}, b"abc", None),
        ({"content_encoding": ""}, b"x", "x"),
        ({"content_encoding": "utf-8"}, b"x", "x"),
        ({"content_encoding": "identity"}, b"x", "x"),
        ({"content_encoding": "gzip"}, b"x", None),
    ],
)
def test_text_is_known_by_its_type_or_its_bytes(
    properties: dict[str, Any], body: bytes, text: str | None
) -> None:
    assert Contents({}, properties, {}, body, None).text == text


def test_headers_stand_apart(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry(headers={"n": 1}, app_id="a"), entry()]))
    found = read_contents(outbox_at(path), 1)
    assert found is not None
    assert not any(secret in repr(found) for secret in ("body 1", "'n'", "app_id"))
    assert (found.properties, found.headers) == ({"app_id": "a"}, {"n": 1})
    assert (found.body, found.text, found.problem) == (b"body 1", "body 1", None)
    assert found.columns["message_id"] == "m-1"
    assert not {"properties", "body"} & found.columns.keys()
    bare = read_contents(outbox_at(path), 2)
    assert bare is not None
    assert (bare.properties, bare.headers) == ({}, {})
    assert read_contents(outbox_at(path), 3) is None


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_properties_that_were_damaged_are_shown_as_they_are(
    path: Path, entry: Make, text: str
) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry()]))
    sql(path, "UPDATE reliablepub_messages SET properties = ?", values=(text,))
    found = read_contents(outbox_at(path), 1)
    assert found is not None
    assert (found.properties, found.headers) == ({"unreadable": text}, {})
    assert found.problem is not None
    assert "checksum" in found.problem
