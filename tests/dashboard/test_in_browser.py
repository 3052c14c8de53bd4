"""The dashboard in Debian's Chromium."""

import importlib
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reliablepub import Message, Outbox, Publisher, RetryPolicy
from reliablepub.dashboard.changes import VERBS
from reliablepub.testing import FakeBroker
from tests.cli.conftest import Cli, line_of
from tests.dashboard.test_pages import HOSTILE
from tests.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
PATHS = ("/", "/messages", "/messages?state=parked", "/messages/1")


@pytest.fixture
def cli(tmp_path: Path, fake_broker: FakeBroker) -> Iterator[Cli]:
    """An outbox with parked messages whose names and bodies are hostile, and a command line."""
    fake_broker.declare_queue("q")
    options: dict[str, Any] = {"outbox": tmp_path / "o.db", "keep_confirmed_s": 3600.0}
    options["retry"] = RetryPolicy.prompt()
    with Publisher(fake_broker.url, **options) as publisher:
        for _ in range(3):
            publisher.publish(
                Message(
                    HOSTILE.encode(),
                    routing_key=HOSTILE,
                    headers={HOSTILE: HOSTILE},
                    content_type="text/plain",
                )
            )
        publisher.publish(b"", routing_key="q").result(20)
        until(lambda: publisher.status.counters.parked == 3)
    cli = Cli(tmp_path, fake_broker.url)
    yield cli
    cli.close()


@pytest.fixture
def address(cli: Cli) -> str:
    served = cli.begin("dashboard", "--outbox", "o.db", "--port", "0", "--allow-changes")
    return line_of(served).split()[1]


@pytest.fixture
def chromium(address: str) -> Iterator[Any]:
    """Last: its event loop runs in this thread, and a publisher would warn of it."""
    assert address
    path = shutil.which("chromium")
    assert path is not None, "make test-site installs it"
    sync_api: Any = importlib.import_module("playwright.sync_api")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture
def wrong(chromium: Any) -> list[str]:
    """What goes wrong in a page: errors, dialogs, and requests to other hosts."""
    return []


def opened(chromium: Any, address: str, wrong: list[str], **options: Any) -> Any:
    page = chromium.new_context(**options).new_page()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("request", lambda one: wrong.extend([one.url] * ("//127.0.0.1:" not in one.url)))
    page.goto(address)
    return page


def go(page: Any, address: str, path: str) -> None:
    page.goto(address.partition("/?")[0] + path)


@pytest.mark.parametrize("width", [360, 1600])
def test_each_screen_fits_and_shows_hostile_texts_as_texts(
    chromium: Any, address: str, wrong: list[str], width: int
) -> None:
    page = opened(chromium, address, wrong, viewport={"width": width, "height": 900})
    for path in PATHS:
        go(page, address, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        if path != "/messages":
            assert "<script>alert(1)</script>" in page.locator("main").inner_text()
    assert wrong == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Any, address: str, wrong: list[str], scheme: str) -> None:
    axe: Any = importlib.import_module("axe_playwright_python.sync_playwright").Axe()
    # axe is a script of another origin, which the page forbids.
    page = opened(chromium, address, wrong, color_scheme=scheme, bypass_csp=True)
    for path in PATHS:
        go(page, address, path)
        found = axe.run(page).response
        assert len(found["passes"]) > 20
        assert json.dumps([one["id"] for one in found["violations"]]) == "[]", path


@pytest.mark.parametrize("verb", VERBS)
def test_a_change_is_shown_first_and_then_made(
    chromium: Any, address: str, wrong: list[str], tmp_path: Path, verb: str
) -> None:
    outbox, label = Outbox(tmp_path / "o.db"), VERBS[verb].label
    outbox.enqueue(Message(b"", routing_key="q"))
    page = opened(chromium, address, wrong)
    go(page, address, "/messages" if verb != "replay" else "/messages?state=confirmed")
    chosen = {"park": 5, "cancel": 5, "replay": 4}.get(verb, 2)
    page.get_by_label(f"Choose message {chosen}", exact=True).check()
    page.locator(f"input[name=verb][value={verb}]").check()
    page.get_by_label("Why, for the journal").fill("as agreed")
    if VERBS[verb].is_addressed:
        page.get_by_text("New address, properties, headers and body").click()
        page.get_by_label("New exchange").check()
        page.get_by_label("Exchange", exact=True).last.fill("elsewhere")
    if VERBS[verb].is_editing:
        page.get_by_label("Headers, one").fill("n:=5")
    before = outbox.status()
    page.get_by_role("button", name="Show what this would do").click()
    page.get_by_text(f"{label} changes 1 message of 1.").wait_for()
    assert outbox.status() == before
    page.get_by_role("button", name=f"{label} 1 message of 1").click()
    page.get_by_text(f"{label}: 1 message changed.").wait_for()
    go(page, address, f"/messages/{chosen}")
    assert re.search(" by .*: .*as agreed", page.locator("main").inner_text())
    assert wrong == []


def test_it_goes_by_the_keyboard(chromium: Any, address: str, wrong: list[str]) -> None:
    page = opened(chromium, address, wrong)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="Check disk, database and relay").focus()
    page.keyboard.press("Enter")
    page.get_by_text("3 messages parked or expired").wait_for()
    assert wrong == []


def test_the_first_screen_follows_a_relay_that_is_killed(
    chromium: Any, address: str, wrong: list[str], cli: Cli, tmp_path: Path
) -> None:
    relay = cli.relay("--outbox", "o.db")
    page = opened(chromium, address, wrong)
    page.get_by_text("3 messages given up").first.wait_for()
    relay.send_signal(signal.SIGKILL)
    Outbox(tmp_path / "o.db").enqueue(Message(b"", routing_key="q"))
    page.get_by_text("no relay runs for this outbox").first.wait_for()
    assert wrong == []
