"""What is in the log, and how much of it."""

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reliablepub import Publisher, RetryPolicy, Unroutable
from reliablepub.headers import FieldValue
from reliablepub.hooks import AttemptEnded, DestinationChanged, LinkChanged, MessageGivenUp
from reliablepub.outbox.entry import Counters
from reliablepub.outcome import Outcome, OutcomeKind
from reliablepub.printable import printable
from reliablepub.relay import journal, thread
from reliablepub.relay.journal import EVENTS, SUM_FIELDS, Journal, LogWriter
from reliablepub.relay.status import Status
from reliablepub.testing import FakeBroker
from tests.policies import ONCE
from tests.waiting import until

DOCUMENT = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
ABOUT = "message m-1 to exchange 'orders' with routing key 'key'"
NO_ROUTE = Outcome(OutcomeKind.RETURNED, 312, "NO_\nROUTE")
TRACED: dict[str, FieldValue] = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "reliablepub"):
        yield caplog


class Now:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def written(now: Now) -> Journal:
    return Journal(now)


def attempt(name: str, exchange: str = "orders") -> AttemptEnded:
    return AttemptEnded("m-1", exchange, "key", TRACED, 3, "1-1", 7, NO_ROUTE, 1, 0.1, 0.0)


GIVEN_UP = MessageGivenUp("m-1", "orders", "key", TRACED, 3, NO_ROUTE, 3)
SAMPLES: dict[str, object] = {
    **dict.fromkeys(("connected", "disconnected", "blocked", "unblocked"), LinkChanged("", 1, 2)),
    **dict.fromkeys(("paused", "resumed"), DestinationChanged("orders", "key", 5, NO_ROUTE)),
    **{name: attempt(name) for name in ("returned", "nacked", "refused", "uncertain")},
    **dict.fromkeys(("parked", "expired", "discarded"), GIVEN_UP),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_an_event_is_one_line_with_its_fields(
    written: Journal, log: pytest.LogCaptureFixture, name: str
) -> None:
    written.calls()[name]([SAMPLES[name]])
    (record,) = log.records
    logger, level, _, fields = EVENTS[name]
    assert (record.name, record.levelno) == (logger.name, level)
    assert "\n" not in record.getMessage()
    assert vars(record)["event"] == name
    for field in fields:
        assert vars(record)[field] is not None


def test_trouble_with_the_outbox_is_a_line_and_so_is_its_end(
    written: Journal, now: Now, log: pytest.LogCaptureFixture
) -> None:
    full = Status(trouble="disk full: nothing can\nbe recorded", counters=Counters(stored=1))
    for status in (Status(), full, full, Status(), full, Status()):
        written.turned(status)
    now.now += 11
    written.turned(Status())
    said = "disk full: nothing can be recorded"
    assert [record.getMessage() for record in log.records] == [
        f"the outbox has trouble: {said}; 1 message is open",
        f"the outbox works again, after: {said}; 0 messages are open",
        f"trouble, {said}: 1 more in 11.0 s",
        f"recovered, {said}: 1 more in 11.0 s",
    ]
    first, second, *_ = map(vars, log.records)
    assert (first["event"], first["reason"], first["open"]) == ("trouble", said, 1)
    assert (second["event"], second["levelname"]) == ("recovered", "INFO")
    assert {*EVENTS} == {*SAMPLES, "trouble", "recovered"}


def test_the_words_say_what_happened_to_which_message(
    written: Journal, log: pytest.LogCaptureFixture
) -> None:
    written.calls()["returned"]([attempt("returned")])
    written.calls()["parked"]([GIVEN_UP])
    written.calls()["discarded"]([replace(GIVEN_UP, may_have_arrived=True)])
    written.calls()["disconnected"]([LinkChanged("no route\nto host", 1, 5)])
    assert [record.getMessage() for record in log.records] == [
        f"{ABOUT}: returned: 312 NO_ ROUTE (attempt 1)",
        f"{ABOUT}: given up (parked): returned: 312 NO_ ROUTE (attempt 3)",
        f"{ABOUT}: given up (discarded): returned: 312 NO_ ROUTE (attempt 3; may have arrived)",
        "not connected to the broker: no route to host; 5 messages are open",
    ]


def test_ten_thousand_refusals_a_second_are_two_lines_in_ten(
    written: Journal, now: Now, log: pytest.LogCaptureFixture
) -> None:
    for _ in range(1_000):
        written.calls()["nacked"]([attempt("nacked")] * 100)
        written.turned(Status())
        now.now += 0.0101
    first, repeated = log.records
    assert vars(first)["event"] == "nacked"
    found = vars(repeated)
    assert [found[name] for name in SUM_FIELDS[:3]] == ["nacked", "orders", 312]
    assert found["event"] == "repeated"
    assert re.fullmatch(
        r"nacked, 312, exchange 'orders': \d+ more in 10.\d s", repeated.getMessage()
    )
    written.close()
    assert 1 + sum(vars(record)["count"] for record in log.records[1:]) == 100_000


def test_a_sum_shows_an_exchange_as_one_line(
    written: Journal, now: Now, log: pytest.LogCaptureFixture
) -> None:
    event = replace(attempt("nacked"), exchange="orders\n\x1b[2J")
    written.calls()["nacked"]([event] * 1_000)
    now.now += 11
    written.turned(Status())
    _, repeated = log.records
    assert vars(repeated)["exchange"] == printable("orders\n\x1b[2J") != "orders\n\x1b[2J"


def test_errors_of_many_exchanges_stay_errors(
    written: Journal, now: Now, log: pytest.LogCaptureFixture
) -> None:
    written.calls()["returned"]([attempt("returned", f"e{n}") for n in range(150)])
    log.clear()
    for n in range(600):
        written.calls()["parked"]([replace(GIVEN_UP, exchange=f"e{n}")])
    [first] = log.records
    assert (first.levelno, vars(first)["event"]) == (logging.ERROR, "parked")
    now.now += 10
    log.clear()
    written.turned(Status())
    [found] = [record for record in log.records if record.levelno >= logging.ERROR]
    assert [vars(found)[name] for name in SUM_FIELDS[:4]] == ["parked", None, 0, 599]
    assert found.getMessage() == "parked, other exchanges and codes: 599 more in 10.0 s"


def test_a_line_names_the_trace_that_the_message_was_published_in(
    written: Journal, log: pytest.LogCaptureFixture
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers: list[dict[str, FieldValue]] = [
        {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"},
        {"traceparent": "00-nonsense"},
        {"traceparent": b"\x00"},
    ]
    for n, one in enumerate(headers):
        written.calls()["parked"]([replace(GIVEN_UP, exchange=f"e{n}", headers=one)])
    assert [vars(record)["trace_id"] for record in log.records] == [trace_id, None, None]


def test_what_is_not_logged_is_not_counted(
    written: Journal, now: Now, log: pytest.LogCaptureFixture
) -> None:
    journal.MESSAGES.setLevel(logging.CRITICAL)
    try:
        written.calls()["nacked"]([attempt("nacked")] * 3)
    finally:
        journal.MESSAGES.setLevel(logging.NOTSET)
    now.now += 100
    written.turned(Status())
    assert log.records == []


def test_the_document_shows_every_event(log: pytest.LogCaptureFixture) -> None:
    table = DOCUMENT.partition("| event | logger | level | fields |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*?) \| `(.*?)` \| (.*?) \| (.*?) \|", table, re.MULTILINE)
    shown = {
        name: (logger, level, tuple(re.findall(r"`(\w+)`", fields)))
        for names, logger, level, fields in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert shown.pop("repeated")[2] == SUM_FIELDS
    assert shown.pop("failed") == (thread.LOGGER.name, "CRITICAL", ())
    assert shown.pop("replaced") == (thread.LOGGER.name, "WARNING", ())
    assert shown == {
        name: (logger.name, logging.getLevelName(level), fields)
        for name, (logger, level, _, fields) in EVENTS.items()
    }


def test_a_publisher_logs_its_failures_and_no_secret(
    fake_broker: FakeBroker, log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    retry = RetryPolicy(returned=ONCE)
    with Publisher(fake_broker.url, outbox=tmp_path / "o.db", retry=retry) as publisher:
        receipt = publisher.publish(b"the body", routing_key="nowhere", message_id="m-1")
        with pytest.raises(Unroutable):
            receipt.result(timeout_s=60)
    events = [vars(record).get("event") for record in log.records]
    assert events[0] == "connected"
    assert {"returned", "parked"} <= set(events)
    text = "\n".join(record.getMessage() + repr(vars(record)) for record in log.records)
    assert "the body" not in text
    assert "guest:guest" not in text


@pytest.mark.parametrize("later", [[], ["after"]])
def test_lines_that_a_slow_handler_has_no_time_for_are_counted(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, later: list[str]
) -> None:
    monkeypatch.setattr(journal, "LINES_MAX", 1)
    gate, is_held = threading.Event(), threading.Event()

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            is_held.set()
            gate.wait(30)

    logger, slow = logging.getLogger("reliablepub.outbox"), Slow()
    logger.addHandler(slow)
    writer = LogWriter()
    try:
        writer.write(logger, logging.INFO, "held", {})
        assert is_held.wait(30)
        writer.write(logger, logging.INFO, "queued", {})
        writer.write(logger, logging.INFO, "dropped", {})
        writer.put(logger, lambda: logger.info("dropped, too"))
        gate.set()
        until(lambda: log.messages[-1:] == ["queued"])
        for text in later:
            writer.write(logger, logging.INFO, text, {})
        writer.close()
    finally:
        logger.removeHandler(slow)
    told = "2 lines were dropped here: a logging handler is too slow"
    assert log.messages == ["held", "queued", told, *later]
