"""The table of clients is what its command would write, as far as a test run can play it."""

import pika
import pytest

from reliablepub.testing import FakeBroker, faults
from tests.clients import page
from tests.clients.adapters import MODULES, OURS
from tests.clients.judge import HONEST, Judgment, judge
from tests.clients.letters import CONFIRMED, NACKED, RETURNED, Letter, unsure
from tests.clients.scripts import SCRIPTS
from tests.clients.table import PAGE, Cell, play_all

PLAYED = ("pika", "aio-pika", *sorted(OURS))
TELLING = frozenset(
    {
        "return, then nack",
        "late ack after a timeout",
        "one message_id, twice in flight",
        "no confirm ever",
        "404 in the middle of a window",
        "connection lost, message taken",
        "multiple ack over a returned tag",
    }
)
WRITTEN = PAGE.read_text()
RESULTS = WRITTEN.partition("<!-- results -->\n")[2].partition("<!-- end -->")[0]


def results_of(title: str) -> dict[str, str]:
    """What the page says of a script, by client."""
    head, _, *rows = [line.strip("|").split("|") for line in RESULTS.splitlines()]
    (found,) = (row for row in rows if row[0].strip() == title)
    return {client.strip(): cell.strip() for client, cell in zip(head, found, strict=True)}


def test_each_script_and_each_client_is_on_the_page() -> None:
    for script in SCRIPTS:
        assert f"| {script.title} | {script.story} |" in WRITTEN
        assert set(MODULES) <= results_of(script.title).keys()


def test_tables_are_written_where_they_are() -> None:
    cells = [
        Cell(script, client, {}, {"one": Judgment(results_of(script.title)[client].strip("*"))})
        for script in SCRIPTS
        for client in MODULES
    ]
    assert page.render(WRITTEN, cells) == WRITTEN


@pytest.mark.parametrize("client", MODULES)
def test_the_versions_are_those_that_are_installed(client: str) -> None:
    if client in OURS:
        assert f"| {client} | reliablepub " in WRITTEN
    else:
        assert f"| {client} | {page.versions(client)} | " in WRITTEN


def test_ours_tell_nothing_but_the_truth() -> None:
    for script in SCRIPTS:
        for client in OURS:
            assert results_of(script.title)[client] == "true"


def test_the_telling_scripts_go_as_the_page_says() -> None:
    scripts = [script for script in SCRIPTS if script.title in TELLING]
    assert len(scripts) == len(TELLING)
    for cell in play_all(PLAYED, scripts):
        said = results_of(cell.script.title)[cell.client]
        assert page.shown(cell.worst) == said, cell.script.title
        assert cell.client not in OURS or cell.worst in HONEST


LETTER = Letter("one")


@pytest.mark.parametrize(
    ("fault", "told", "judgment"),
    [
        (None, CONFIRMED, Judgment.TRUE),
        (None, NACKED, Judgment.FALSE_FAILURE),
        (None, RETURNED, Judgment.FALSE_FAILURE),
        (None, unsure(TimeoutError()), Judgment.UNSURE),
        (None, None, Judgment.UNSURE),
        (faults.Nack(), NACKED, Judgment.TRUE),
        (faults.Nack(), CONFIRMED, Judgment.FALSE_CONFIRM),
        (faults.Return(), RETURNED, Judgment.TRUE),
        (faults.Return(), CONFIRMED, Judgment.FALSE_CONFIRM),
        (faults.Return(), None, Judgment.LOST),
    ],
)
def test_a_judgment(
    fake_broker: FakeBroker, fault: faults.Fault | None, told: str | None, judgment: Judgment
) -> None:
    fake_broker.declare_queue("one")
    if fault is not None:
        fake_broker.inject(fault)
    with pika.BlockingConnection(pika.URLParameters(fake_broker.url)) as connection:
        connection.channel().basic_publish("", "one", LETTER.body, mandatory=True)
        fake_broker.wait_for(1, timeout_s=60)
    assert judge(LETTER, told, fake_broker.published, has_ended=True) is judgment


def test_who_is_still_at_it_has_hung() -> None:
    assert judge(LETTER, None, (), has_ended=False) is Judgment.HUNG
