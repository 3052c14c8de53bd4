"""Who may use the page, and what a browser is told."""

from typing import Any

import pytest

from reliablepub import Outbox
from tests.dashboard.conftest import KNOWN, Open


def test_the_printed_address_lets_one_browser_in(browse: Open) -> None:
    client = browse().client
    client.cookies.clear()
    for path in ("/", "/now", "/messages", "/static/style.css", "/changes/preview"):
        assert client.get(path).status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    answer = client.get("/messages?state=parked&token=right-token", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (
        303,
        "http://127.0.0.1:8025/messages?state=parked",
    )
    (cookie,) = answer.headers.get_list("set-cookie")
    assert "reliablepub-8025=right-cookie" in cookie
    assert {"HttpOnly", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
    assert client.get("/").status_code == 200
    client.cookies.set("reliablepub-8025", "wrong")
    assert client.get("/", headers={"Cookie": "reliablepub-8025=wrong"}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "169.254.1.1"])
def test_another_name_of_this_host_is_refused(browse: Open, host: str) -> None:
    """A page elsewhere may give its own name the address 127.0.0.1."""
    client = browse().client
    for name in ("localhost", "127.0.0.1:8025", "[::1]:8025"):
        assert client.get("/now", headers={"Host": name}).status_code in {200, 403}
    answer = client.get("/?token=right-token", headers={"Host": host})
    assert (answer.status_code, "another name" in answer.text) == (403, True)


def test_each_answer_forbids_what_the_page_does_not_need(browse: Open) -> None:
    client = browse().client
    for path in ("/", "/messages", "/static/htmx.min.js", "/none", "/messages/1?token=x"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == (
            "nosniff",
            "no-referrer",
        )
    page = client.get("/").text
    assert "<script>" not in page
    assert " style=" not in page
    assert "onclick" not in page


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Form-Token": "wrong"},
        {"X-Form-Token": KNOWN.form_token(""), "Origin": "http://evil.example"},
        {"X-Form-Token": KNOWN.form_token("mallory")},
    ],
)
def test_a_forged_form_changes_nothing(browse: Open, parked: str, headers: dict[str, str]) -> None:
    client = browse().client
    for path in ("/changes/preview", "/changes"):
        answer = client.post(path, data={"verb": "discard", "state": "parked"}, headers=headers)
        assert answer.status_code == 403
    assert Outbox(parked).status().parked == 5


def test_without_the_flag_there_is_no_change(browse: Open, parked: str) -> None:
    browser = browse(may_change=False)
    for path in ("/changes/preview", "/changes"):
        headers = {"X-Form-Token": KNOWN.form_token("")}
        answer = browser.client.post(path, data={"verb": "discard"}, headers=headers)
        assert answer.status_code == 404
    assert "<fieldset>\n<legend>Change" not in browser.get("/messages")
    assert "read-only" in browser.get("/")


def test_behind_a_proxy_the_person_is_named(browse: Open, parked: str) -> None:
    options: dict[str, Any] = {"user_header": "X-User", "hosts": ["outbox.example"]}
    browser = browse(**options)
    assert "has sent no X-User" in browser.client.get("/").text
    headers = {"X-User": "ann", "Host": "outbox.example"}
    assert ", ann</span>" in browser.client.get("/", headers=headers).text
    headers["X-Form-Token"] = KNOWN.form_token("ann")
    fields = {"verb": "retry", "id": "1", "note": "as agreed"}
    assert browser.client.post("/changes", data=fields, headers=headers).status_code == 200
    forged = headers | {"X-User": "bob"}
    assert browser.client.post("/changes", data=fields, headers=forged).status_code == 403
    assert "put back by ann: as agreed" in browser.client.get("/messages/1", headers=headers).text
