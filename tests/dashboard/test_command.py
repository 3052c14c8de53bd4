"""`reliablepub dashboard` as a process, before the eyes of a browser that knows its address."""

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from reliablepub import Message, Outbox
from reliablepub.cli import main
from reliablepub.testing import FakeBroker
from tests.cli.conftest import Cli, line_of
from tests.waiting import until


@pytest.fixture
def cli(tmp_path: Path, fake_broker: FakeBroker) -> Iterator[Cli]:
    cli = Cli(tmp_path, fake_broker.url)
    Outbox(tmp_path / "o.db").create()
    yield cli
    cli.close()


def test_the_printed_address_opens_the_page_until_a_signal(cli: Cli) -> None:
    served = cli.begin("dashboard", "--outbox", "o.db", "--port", "0")
    (url,) = re.findall(r"^open (http://127\.0\.0\.1:\d+/\?token=[\w-]{43})$", line_of(served))
    with httpx.Client(follow_redirects=True) as browser:
        page = browser.get(url)
        assert (page.status_code, "read-only" in page.text) == (200, True)
        assert "token=" not in str(page.url)
        for path in ("messages", "static/htmx.min.js", "static/style.css"):
            assert browser.get(page.url.join(path)).status_code == 200
        weight = sum(
            len(browser.get(page.url.join(path)).content)
            for path in ("/", "static/htmx.min.js", "static/style.css")
        )
        assert weight < 150_000
    assert httpx.get(url.partition("?")[0]).status_code == 403
    ended = cli.stop(served)
    assert ended.code == 0
    assert ended.err == "", "no line of access shows the token"


def test_a_relay_that_is_killed_while_one_looks(cli: Cli, tmp_path: Path) -> None:
    served = cli.begin("dashboard", "--outbox", "o.db", "--port", "0")
    url = line_of(served).split()[1]
    relay = cli.relay("--outbox", "o.db")
    with httpx.Client(follow_redirects=True) as browser:
        start = browser.get(url).url
        until(lambda: "nothing to do" in browser.get(start.join("/now")).text)
        relay.send_signal(signal.SIGKILL)
        Outbox(tmp_path / "o.db").enqueue(Message(b"", routing_key="q"))
        until(lambda: "start `reliablepub relay`" in browser.get(start.join("/now")).text)
    assert cli.stop(served).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--host", "0.0.0.0"), 2, "give --trust-proxy"),
        (("--name", "h"), 2, "give --trust-proxy"),
        (("--host", "192.0.2.1", "--trust-proxy", "X-User"), 2, "cannot listen on 192.0.2.1"),
    ],
)
def test_what_is_not_safe_or_not_possible_is_refused(
    tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    Outbox(tmp_path / "o.db").create()
    command = ["dashboard", "--outbox", str(tmp_path / "o.db"), *arguments]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, words in result.output) == (code, True), result.output


def test_a_port_that_is_taken_and_an_outbox_that_is_missing(tmp_path: Path) -> None:
    missing = CliRunner().invoke(main, ["dashboard", "--outbox", str(tmp_path / "none.db")])
    assert (missing.exit_code, "there is no outbox" in missing.output) == (4, True)
    Outbox(tmp_path / "o.db").create()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = ["dashboard", "--outbox", str(tmp_path / "o.db"), "--port", port]
        result = CliRunner().invoke(main, command)
    assert (result.exit_code, f"port {port}: " in result.output) == (2, True)


def test_the_extra_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outbox(tmp_path / "o.db").create()
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    result = CliRunner().invoke(main, ["dashboard", "--outbox", str(tmp_path / "o.db")])
    assert (result.exit_code, "the extra dashboard" in result.output) == (2, True)
