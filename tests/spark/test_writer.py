"""What happens beside the driver when a write has failed for good, without Spark."""

import logging
import os
from pathlib import Path

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from reliablepub import ConfigurationError
from spark_sink import RowsNotConfirmed, TasksNotHeard
from spark_sink.failures import SAME_IDS
from spark_sink.options import parse
from spark_sink.report import Counts, Written
from spark_sink.schema import Columns
from spark_sink.writer import RabbitMQWriter

COLUMNS = Columns({"value": 0}, {"persistent": True}, is_json=False)
FINISHED = Written("w", 0, Counts(rows=5, confirmed=5), "nowhere/at/all.parquet")
MESSAGES: list[WriterCommitMessage | None] = [FINISHED, None, None]


@pytest.mark.parametrize(
    ("write_id", "batch", "name"), [("w", None, "write w"), (None, 7, "of batch 7")]
)
def test_abort_says_what_may_have_been_sent(
    write_id: str | None, batch: int | None, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = parse({"url": "amqp://user:canary@a/"})
    RabbitMQWriter(settings, COLUMNS, write_id).abort(MESSAGES, batch)
    assert name in caplog.text
    assert "1 of 3 partitions are finished, 5 of their rows confirmed" in caplog.text
    assert "rows of the others may have been sent" in caplog.text
    assert "canary" not in caplog.text


@pytest.mark.parametrize(
    ("counts", "level", "words"),
    [
        (
            Counts(rows=7, confirmed=7, waited_s=0.25),
            logging.INFO,
            "12 rows in 2 partitions, 12 confirmed, 0 may have been sent twice; tasks waited 0.2 s",
        ),
        (
            Counts(rows=7, confirmed=4, unroutable=2, invalid=1),
            logging.WARNING,
            "12 rows in 2 partitions, 9 confirmed, 2 unroutable, 1 invalid, 0 may have been sent",
        ),
        (
            Counts(rows=7, confirmed=7, duplicates_risked=3),
            logging.WARNING,
            "12 confirmed, 3 may have been sent twice",
        ),
    ],
)
def test_a_commit_tells_what_was_confirmed(
    counts: Counts, level: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RabbitMQWriter(parse({"url": "amqp://user:canary@a/"}), COLUMNS, "w")
    with caplog.at_level(logging.INFO, "reliablepub.spark"):
        writer.commit([FINISHED, Written("w", 1, counts, None)])
        writer.commit([])
    [told, empty] = caplog.records
    assert told.levelno == level
    assert told.message.startswith("write w: ")
    assert words in told.message
    assert empty.message.startswith("write w: 0 rows in 0 partitions, 0 confirmed, 0 may")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "2 of 3 tasks of this write did not report"),
        (7, "2 of 3 tasks of epoch 7 did not report"),
    ],
)
def test_a_commit_without_the_word_of_every_task_is_none(batch: int | None, words: str) -> None:
    """Spark's continuous trigger never calls `write`, and commits all the same."""
    writer = RabbitMQWriter(parse({"url": "amqp://a/"}), COLUMNS, "w")
    with pytest.raises(TasksNotHeard, match=words):
        writer.commit(MESSAGES, batch)
    writer.commit([FINISHED, FINISHED], batch)


@pytest.mark.parametrize(("days", "left"), [("", 3), ("30", 0)])
def test_a_report_of_a_long_stream_is_as_large_as_its_options_say(
    report: Path, days: str, left: int
) -> None:
    options = {"report": str(report), "reportKeep": "1"} | (
        {"reportKeepDays": days} if days else {}
    )
    writer = RabbitMQWriter(parse({"url": "amqp://a/", **options}), COLUMNS, None)
    (report / "failed").mkdir(parents=True)
    for batch in range(3):
        file = report / "failed" / f".part-q-{batch}-0-00000000-{'0' * 32}.parquet"
        file.touch()
        failed = Written(f"q-{batch}", 0, Counts(rows=1, unroutable=1), str(file), "run")
        writer.commit([failed], batch)
        for path in report.rglob("*q-*"):
            month_ago = path.stat().st_mtime - 31 * 86_400
            os.utime(path, (month_ago, month_ago))
    writer.commit([Written("q-3", 0, Counts(rows=1, unroutable=1), None, "run")], 3)
    assert len([*(report / "writes").iterdir()]) == 1
    assert len([*(report / "failed").iterdir()]) == left


def test_errors_promise_no_ids_that_a_corrected_option_changes() -> None:
    """Who corrects the routing key as the error asks, and starts again, gets other ids."""
    error = RowsNotConfirmed(
        partition=0, row=0, message_id="m", outcome="unroutable", reply_code=312, reply_text="-"
    )
    assert str(error).endswith(SAME_IDS)
    for condition in ("idColumns", "options and partitions stay the same", "writeId"):
        assert condition in SAME_IDS


def test_abort_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Spark would show that error, and not the one that explains the failure."""
    settings = parse({"url": "amqp://a/", "report": "no-such-disk://report"})
    RabbitMQWriter(settings, COLUMNS, "w").abort(MESSAGES)
    [aborted, cleaning] = caplog.records
    assert aborted.levelno == cleaning.levelno == logging.ERROR
    assert "the report could not be cleaned up" in cleaning.message
    assert cleaning.exc_info is not None


@pytest.mark.parametrize(
    ("options", "column", "is_refused"),
    [
        ({}, "message_id", False),
        ({}, "type", True),
        ({"unroutable": "collect"}, "message_id", True),
        ({"unroutable": "collect", "writeId": "orders-7"}, "message_id", False),
    ],
)
def test_for_each_batch_wants_a_name_by_which_a_replay_is_recognized(
    options: dict[str, str], column: str, *, is_refused: bool
) -> None:
    """By a consumer, if the rows have no ids of their own; by the report, if rows are collected."""
    settings = parse({"url": "amqp://a/", "report": "/r", **options})
    columns = Columns({"value": 0, column: 1}, {"persistent": True}, is_json=False)
    writer = RabbitMQWriter(settings, columns, settings.write_id or "random")
    if is_refused:
        with pytest.raises(ConfigurationError, match="give each such write a 'writeId'"):
            writer._write_of("q-7")
    else:
        assert writer._write_of("q-7") == f"q-7-{settings.write_id or 'random'}"
