"""Each change that the page offers: first what it would do, then that it is done."""

import pytest

from reliablepub import Message, Outbox
from reliablepub.dashboard.changes import VERBS
from reliablepub.outbox.admin.selection import Selection, find
from reliablepub.outbox.opening import outbox_at
from tests.dashboard.conftest import KNOWN, Open
from tests.dashboard.test_pages import text_of


def found(where: str, *states: str) -> list[dict[str, object]]:
    return find(outbox_at(where), Selection(states=states), limit=99)


@pytest.mark.parametrize(
    ("verb", "states", "fields", "after"),
    [
        ("retry", "parked", {}, ("waiting", 5)),
        ("park", "ready", {}, ("parked", 6)),
        ("discard", "parked", {}, ("parked", 0)),
        ("reroute", "parked", {"has_routing_key": "yes", "to_routing_key": "x"}, ("waiting", 5)),
        ("edit", "parked", {"set": "type=t\npriority=5", "header": "n:=5"}, ("waiting", 5)),
        ("replay", "confirmed", {}, ("confirmed", 0)),
        ("skip", "parked", {}, ("parked", 5)),
        ("cancel", "ready", {}, ("ready", 0)),
    ],
)
def test_of_all_that_match(  # noqa: PLR0917 - pytest's
    browse: Open,
    parked: str,
    verb: str,
    states: str,
    fields: dict[str, str],
    after: tuple[str, int],
) -> None:
    Outbox(parked).enqueue(Message(b"", routing_key="q"))
    count = len(found(parked, states))
    browser = browse()
    form = {"verb": verb, "state": states, "note": "as agreed", **fields}
    told = text_of(browser.post("/changes/preview", **form))
    assert (
        f"{VERBS[verb].label} changes {count} message{'' if count == 1 else 's'} of {count}."
        in told
    )
    assert len(found(parked, states)) == count, "so far nothing is changed"
    done = text_of(browser.post("/changes", **form))
    assert f"{VERBS[verb].label}: {count} message{'' if count == 1 else 's'} changed." in done
    state, left = after
    rows = found(parked, *(("ready", "waiting") if state == "waiting" else (state,)))
    assert len([row for row in rows if state != "waiting" or row["exchange"]]) == left
    assert Outbox(parked).audit().is_right


def test_every_verb_is_tried() -> None:
    tried = {"retry", "park", "discard", "reroute", "edit", "replay", "skip", "cancel"}
    assert tried == set(VERBS)


def test_of_the_chosen_ones(browse: Open, parked: str) -> None:
    done = browse().post("/changes", verb="retry", id=["2", "4"], state="parked")
    assert "2 messages changed" in text_of(done)
    assert [row["id"] for row in found(parked, "parked")] == [1, 3, 5]


def test_an_edited_message_keeps_its_original(browse: Open, parked: str) -> None:
    browser = browse()
    fields = {"has_body": "yes", "body": "<new>", "unset": "header.x", "set": "type=t"}
    browser.post("/changes", verb="edit", id="1", **fields)
    seen = text_of(browser.get("/messages/1"))
    assert "edited by" in seen
    assert "<new>" in seen
    assert 'As it was before its edit {"n": 1}' in seen


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"verb": "explode"}, "choose what to do"),
        ({"verb": "retry", "id": "x"}, "an id is not a number"),
        ({"verb": "reroute"}, "give a new exchange or routing key"),
        ({"verb": "edit"}, "give what to change"),
        ({"verb": "edit", "set": "priority=high"}, "priority is a whole number"),
        ({"verb": "edit", "header": "x"}, "neither NAME=TEXT nor NAME:=JSON"),
        ({"verb": "edit", "set": "priority=999"}, "priority"),
        ({"verb": "park", "older_than": "soon"}, "is not a duration"),
        ({"verb": "park", "note": "\0"}, "U+0000"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    browse: Open, parked: str, fields: dict[str, str], why: str
) -> None:
    for path in ("/changes/preview", "/changes"):
        assert why in text_of(browse().post(path, **fields))
    assert Outbox(parked).status().parked == 5


def test_a_form_of_other_bytes_than_utf_8_is_refused(browse: Open, parked: str) -> None:
    headers = {"X-Form-Token": KNOWN.form_token("")}
    answer = browse().client.post("/changes", content=b"verb=discard\xff", headers=headers)
    assert (answer.status_code, "choose what to do" in answer.text) == (200, True), answer.text
    assert Outbox(parked).status().parked == 5
