"""What the pages show, of both stores."""

import html
import re
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from reliablepub import Message, Outbox, OutboxKeys
from tests.asking import fill
from tests.dashboard.conftest import Open
from tests.sqlite import sql

HOSTILE = "<script>alert(1)</script>\"'&\x07"
KEYS = OutboxKeys({"k": b"k" * 32})


def text_of(page: str) -> str:
    """What a reader sees."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_the_first_screen_says_what_is_wrong_and_what_to_do(browse: Open, parked: str) -> None:
    Outbox(parked).enqueue(Message(b"", routing_key="q"))
    for path in ("/", "/now"):
        seen = text_of(browse().get(path))
        assert "no relay runs for this outbox: start `reliablepub relay`" in seen
        assert "5 parked orders (several)" in seen
        assert "returned: 312 NO_ROUTE" in seen
        assert "1 open" in seen
    assert "/messages?state=parked&amp;exchange=orders" in browse().get("/")


def test_the_checks_are_those_of_doctor(browse: Open, parked: str) -> None:
    seen = text_of(browse().get("/checks"))
    assert "given up 5 messages parked or expired" in seen
    assert "What to do: reliablepub outbox summary" in seen


def test_lists_name_celery_tasks(browse: Open, where: str) -> None:
    task = Message(b"", routing_key="celery", headers={"task": "shop.bill", "id": "t1"})
    message_id = Outbox(where).enqueue(task)
    for query in ("state=ready", f"name={message_id}"):
        assert "shop.bill" in browse().get(f"/messages?{query}")
        assert "shop.bill" not in browse(shows_bodies=False).get(f"/messages?{query}")


def test_messages_are_found_by_each_field(browse: Open, parked: str) -> None:
    browser = browse()
    assert "No message matches." in browser.get("/messages?exchange=none")
    for query, count in (
        ("state=parked", 5),
        ("state=parked&exchange=ord*", 5),
        ("routing_key=order.3", 1),
        ("reason=no_route&older_than=0s", 5),
        ("reason=404", 0),
        ("newer_than=0s", 0),
        ("state=confirmed", 1),
        ("name=came", 1),
        ("name=1", 1),
        ("name=none", 0),
    ):
        page = browser.get(f"/messages?{query}")
        assert len(set(re.findall(r'href="/messages/(\d+)"', page))) == count, query
    assert "&#39;soon&#39; is not a duration" in browser.get("/messages?older_than=soon", 400)
    assert "there is no state" in browser.get("/messages?state=lost", 400)


def test_pages_follow_each_other_by_id(browse: Open, where: str) -> None:
    Outbox(where).enqueue_many(Message(b"", routing_key="q") for _ in range(120))
    seen: list[str] = []
    path: str | None = "/messages?state=ready"
    browser = browse()
    while path is not None:
        page = browser.get(path)
        seen += re.findall(r'href="/messages/(\d+)"', page)
        found = re.search(r'<a href="(\?[^"]*)">Next page', page)
        path = None if found is None else f"/messages{html.unescape(found[1])}"
    assert [int(id_) for id_ in seen] == sorted({int(id_) for id_ in seen})
    assert len(seen) == 120


def test_a_message_tells_its_story(browse: Open, parked: str) -> None:
    seen = text_of(browse().get("/messages/1"))
    assert "Why: returned: 312 NO_ROUTE" in seen
    assert "What happened:" in seen
    assert '{"n": 1}' in seen
    assert "its message id is not known" in text_of(browse().get("/messages/99"))


def test_nothing_of_a_message_becomes_markup(browse: Open, where: str) -> None:
    message = Message(
        HOSTILE.encode(),
        exchange=HOSTILE[:200],
        routing_key=HOSTILE,
        message_id=HOSTILE,
        content_type="text/plain",
        headers={HOSTILE: HOSTILE},
        ordering_key=HOSTILE,
        type=HOSTILE,
    )
    Outbox(where).enqueue(message)
    browser = browse()
    for path in ("/", "/messages", "/messages/1", f"/messages?exchange={quote(HOSTILE)}"):
        page = browser.get(path)
        assert "<script>alert" not in page
        assert "\x07" not in page
    told = browser.post("/changes/preview", verb="park", id="1", note=HOSTILE)
    assert "<script>alert" not in told


def test_what_is_encrypted_stays_closed(browse: Open, where: str) -> None:
    fill(where, Message(b"secret body", routing_key="q", headers={"secret": "h"}), keys=KEYS)
    for options in ({}, {"shows_bodies": False}, {"keys": KEYS, "shows_bodies": False}):
        assert "secret" not in browse(**options).get("/messages/1")
    assert "secret body" in browse(keys=KEYS).get("/messages/1")


def test_a_body_that_is_no_text_is_shown_in_hexadecimal(browse: Open, where: str) -> None:
    Outbox(where).enqueue(Message(b"\x00\xff", routing_key="q"))
    assert "00 ff" in browse().get("/messages/1")


def test_looking_changes_nothing(browse: Open, parked: str) -> None:
    if parked.startswith("postgresql"):
        pytest.skip("a server has no file to compare")
    browser, before = browse(), Path(parked).read_bytes()
    for path in ("/", "/now", "/messages", "/messages/1"):
        browser.get(path)
    assert Path(parked).read_bytes() == before
    assert Outbox(parked).status().relay is None


def test_an_outbox_that_is_gone_is_told(browse: Open, where: str) -> None:
    if where.startswith("postgresql"):
        pytest.skip("of a file")
    browser = browse()
    browser.get("/")
    Path(where).rename(f"{where}.elsewhere")
    assert "there is no outbox" in text_of(browser.get("/messages", 503))


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_pages_of_five_million_messages(browse: Open, where: str) -> None:
    if where.startswith("postgresql"):
        pytest.skip("the file is filled by plain SQL")
    count = 5_000_000
    sql(Path(where), FILLED, values=(count,))
    sql(Path(where), f"UPDATE reliablepub_ledger SET last_id = {count}, stored = {count}")
    browser, took = browse(), []
    for after in (0, count // 2, count - 1_000):
        begun = time.monotonic()
        page = browser.get(f"/messages?exchange=orders&after={after}")
        took.append(time.monotonic() - begun)
        assert f'href="/messages/{after + 1}"' in page
    assert max(took) < 20 * min(took) < 20.0, "as long at the end as at the beginning"


FILLED = """
INSERT INTO reliablepub_messages (
    id, message_id, exchange, routing_key, stored_at, size, checksum, body
)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
SELECT i, 'm-' || i, 'orders', 'order', 1e9, 200, -1, x'78' FROM n
"""
