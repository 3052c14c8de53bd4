"""One attempt of a task at the fake broker, without Spark: outcomes, patience, the connection."""

import pickle
import threading
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
from tenacity import wait_fixed

from reliablepub import ConfigurationError, Link, Message
from reliablepub.relay.relay import Relay
from reliablepub.testing import FakeBroker
from reliablepub.testing.faults import DelayConfirm, DropConfirm, HoldConfirms, Nack
from spark_sink import connection
from spark_sink.failures import PartitionStalled, RowsNotConfirmed
from spark_sink.options import parse
from spark_sink.rows import Invalid
from spark_sink.settings import Settings
from spark_sink.task import Failure, Sending, slice_rows
from tests.amqp_probe import AmqpProbe
from tests.certificates import broker_with, signed
from tests.rabbitmq import RabbitMQNode
from tests.waiting import until

QUEUE = "q"


def settings_for(fake: FakeBroker, **options: str) -> Settings:
    quick = {"nackedAttempts": "1", "returnedAttempts": "1", "report": "/unused"}
    return parse({"url": fake.url} | quick | options)


def rows(count: int, routing_key: str = QUEUE) -> list[Message | Invalid]:
    return [Message(b"%d" % n, routing_key=routing_key, message_id=str(n)) for n in range(count)]


def send(settings: Settings, *pieces: Iterable[Message | Invalid]) -> tuple[Sending, list[Failure]]:
    failures: list[Failure] = []
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7)
        for piece in pieces:
            failures += sending.send(piece, sending.counts.rows)
        failures += sending.finish()
    return sending, failures


def test_all_is_confirmed_when_it_returns(fake: FakeBroker) -> None:
    sending, failures = send(settings_for(fake), *[rows(300)] * 30)
    assert sending.counts.rows == sending.counts.confirmed == 9_000 == fake.published_count
    assert sending.counts.bytes == 30 * sum(len(str(n)) for n in range(300))
    assert failures == []
    assert sending.oldest_open_row == 9_000


def test_an_unroutable_row_fails_the_task_by_name(fake: FakeBroker) -> None:
    piece = [*rows(3), Message(b"secret", exchange="", routing_key="nobody", message_id="lost")]
    with pytest.raises(RowsNotConfirmed) as caught:
        send(settings_for(fake), rows(2), piece)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.partition, error.row, error.message_id) == (7, 5, "lost")
    assert error.outcome == "unroutable"
    assert "row 5 of partition 7 (message lost) was not confirmed but unroutable: 312 NO_ROUTE" in (
        str(error)
    )
    assert "secret" not in str(error)


def test_all_rows_that_are_known_to_have_failed_are_told(fake: FakeBroker) -> None:
    """Those of one slice, whichever of them fails the task."""
    lost = [Message(b"", routing_key="nobody", message_id=f"lost-{n}") for n in range(3)]
    settings = settings_for(fake, unroutable="fail")
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7)
        with pytest.raises(RowsNotConfirmed):
            list(chain(sending.send([*rows(2), *lost], 0), sending.finish()))
        found = [(failure.row, failure.message_id) for failure in sending.fatal()]
    assert found == [(2, "lost-0"), (3, "lost-1"), (4, "lost-2")]


def test_all_invalid_rows_of_a_piece_are_told_and_none_that_is_collected(fake: FakeBroker) -> None:
    settings = settings_for(fake, unroutable="collect")
    lost = Message(b"", routing_key="nobody", message_id="lost")
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7)
        list(sending.send([lost, *rows(2)], 0))
        with pytest.raises(RowsNotConfirmed, match="row 4 of partition 7 was not confirmed"):
            list(sending.send([*rows(1), Invalid("null"), *rows(1), Invalid("no UTF-8")], 3))
        found = [(failure.row, failure.reply_text) for failure in sending.fatal()]
    assert found == [(4, "null"), (6, "no UTF-8")]


def test_a_refused_row_is_found_among_innocent_ones(fake: FakeBroker) -> None:
    piece = [*rows(3), Message(b"", exchange="absent", message_id="guilty"), *rows(9)[3:]]
    with pytest.raises(RowsNotConfirmed, match=r"row 3 .*message guilty.* refused: 404 NOT_FOUND"):
        send(settings_for(fake), piece)


@pytest.mark.parametrize("mode", ["unroutable", "refused", "invalid"])
def test_what_is_collected_is_counted_and_told(fake: FakeBroker, mode: str) -> None:
    wrong: dict[str, Message | Invalid] = {
        "unroutable": Message(b"", routing_key="nobody", message_id="x"),
        "refused": Message(b"", exchange="absent", message_id="x"),
        "invalid": Invalid("value: is null"),
    }
    piece = [*rows(2), wrong[mode], *rows(4)[2:]]
    sending, [failure] = send(settings_for(fake, **{mode: "collect"}), piece)
    assert failure.row == 2
    assert failure.outcome == mode
    assert getattr(sending.counts, mode) == sending.counts.failed == 1
    assert sending.counts.rows == 5
    assert sending.counts.confirmed == 4


def test_nacks_are_collected_as_refused(fake: FakeBroker) -> None:
    fake.inject(Nack(nth=2), Nack(nth=4))
    sending, failures = send(settings_for(fake, refused="collect"), rows(5))
    assert [(failure.row, failure.outcome) for failure in failures] == [
        (1, "nacked"),
        (3, "nacked"),
    ]
    assert sending.counts.nacked == 2


def test_more_failures_than_a_receipt_would_keep(fake: FakeBroker) -> None:
    pieces = [rows(500, routing_key="nobody")] * 5
    sending, failures = send(settings_for(fake, unroutable="collect"), *pieces)
    assert [failure.row for failure in failures] == list(range(2_500))
    assert sending.counts.unroutable == 2_500


def test_a_failure_names_its_row_even_if_rows_share_an_id(fake: FakeBroker) -> None:
    piece = [
        Message(b"", routing_key=key, message_id="same")
        for key in (QUEUE, "nobody", QUEUE, "nobody")
    ]
    sending, failures = send(settings_for(fake, unroutable="collect"), piece)
    assert [failure.row for failure in failures] == [1, 3]
    assert sending.counts.confirmed == 2


def test_without_confirms_the_task_fails_and_says_so(fake: FakeBroker) -> None:
    fake.inject(HoldConfirms())
    with pytest.raises(PartitionStalled) as caught:
        send(settings_for(fake, deliveryTimeout="3"), rows(5))
    text = str(pickle.loads(pickle.dumps(caught.value)))
    assert "partition 7: no row was settled for 3 s (the broker is connected and does not" in text
    assert "0 rows were confirmed" in text


def test_confirms_that_trickle_in_are_progress(fake: FakeBroker) -> None:
    """The patience is for standstills: here all of it would be over twice."""
    fake.inject(*(DelayConfirm(nth=n, for_s=0.5 * n) for n in range(1, 21)))
    since = time.monotonic()
    sending, _ = send(settings_for(fake, deliveryTimeout="4"), rows(20))
    assert sending.counts.confirmed == 20
    assert 9.0 <= sending.counts.waited_s <= time.monotonic() - since


def test_a_row_that_the_broker_keeps_refusing_is_given_up_and_no_standstill(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is settled for longer than ``deliveryTimeout``, but the broker answers."""
    monkeypatch.setattr(connection, "wait_random_exponential", lambda **_: wait_fixed(1.5))
    fake.inject(Nack(keep=True))
    settings = settings_for(
        fake, refused="collect", nackedAttempts="6", deliveryTimeout="6", report="/nowhere"
    )
    sending, failures = send(settings, rows(1))
    assert [failure.outcome for failure in failures] == ["nacked"]
    assert sending.counts.confirmed == 0


@pytest.mark.rabbit
def test_a_broker_that_answers_in_jerks_is_no_standstill(
    rabbitmq: AmqpProbe, rabbitmq_node: RabbitMQNode
) -> None:
    queue = rabbitmq.declare_queue()
    settings = parse({"url": rabbitmq.url, "deliverytimeout": "4", "windowmin": "1", "window": "1"})
    done = threading.Event()

    def jerk() -> None:
        for _ in range(40):  # 13 s; the other rows find RabbitMQ awake
            rabbitmq_node.pause()
            time.sleep(0.3)
            rabbitmq_node.resume()
            if done.wait(0.02):
                break

    send(settings, rows(1, queue))
    thread = threading.Thread(target=jerk)
    thread.start()
    try:
        sending, _ = send(settings, rows(1_000, queue))
    finally:
        done.set()
        thread.join()
        connection.close_idle()
    assert sending.counts.confirmed == 1_000
    print(f"{sending.counts.waited_s:.1f} s for 1,000 rows")
    assert sending.counts.waited_s > settings.delivery_timeout_s


def test_the_counts_of_a_standstill_are_true(fake: FakeBroker) -> None:
    fake.inject(HoldConfirms(nth=4))
    with pytest.raises(PartitionStalled) as caught:
        send(settings_for(fake, deliveryTimeout="2"), rows(10))
    assert (caught.value.confirmed, caught.value.open) == (3, 7)
    assert "3 rows were confirmed, 7 more may have been sent" in str(caught.value)


def test_a_row_that_is_larger_than_what_may_be_under_way_goes_alone(fake: FakeBroker) -> None:
    large = [Message(b"x" * 40 * 1024 * 1024, routing_key=QUEUE, message_id="large")]
    sending, _ = send(settings_for(fake), rows(500), large, rows(500))
    assert sending.counts.confirmed == 1_001


def test_rows_that_are_sent_again_are_counted(fake: FakeBroker) -> None:
    fake.inject(DropConfirm(nth=2))
    sending, _ = send(settings_for(fake, confirmTimeout="2"), rows(3))
    assert sending.counts.confirmed == 3
    assert sending.counts.duplicates_risked >= 1
    assert send(settings_for(fake, confirmTimeout="2"), rows(3))[0].counts.duplicates_risked == 0


def test_a_row_that_is_sent_three_times_is_counted_once(fake: FakeBroker) -> None:
    fake.inject(DropConfirm(times=2))
    sending, _ = send(settings_for(fake, confirmTimeout="1.5"), rows(1))
    assert (sending.counts.confirmed, fake.published_count) == (1, 3)
    assert sending.counts.duplicates_risked == 1


def test_with_no_broker_the_task_fails_and_says_why(fake: FakeBroker) -> None:
    settings = settings_for(fake, deliveryTimeout="0.2")
    fake.stop()
    with pytest.raises(PartitionStalled, match=r"disconnected: .*: connection refused|connecting"):
        send(settings, rows(5_000))


def test_an_outage_shorter_than_that_is_survived(fake: FakeBroker) -> None:
    settings = settings_for(fake)
    send(settings, rows(1))
    fake.stop()
    threading.Timer(0.3, fake.start).start()
    assert send(settings, rows(10))[0].counts.confirmed == 10


def test_one_connection_serves_task_after_task(fake: FakeBroker) -> None:
    for _ in range(3):
        send(settings_for(fake, exchange=""), rows(3))
    assert fake.connections == 1
    assert {published.connection for published in fake.published} == {1}


def test_another_broker_takes_the_place_of_the_first(fake: FakeBroker) -> None:
    send(settings_for(fake), rows(1))
    with FakeBroker() as other:
        other.declare_queue(QUEUE)
        send(settings_for(other), rows(1))
        fake.wait_for(lambda: fake.connections == 0, timeout_s=60)
        connection.close_idle()


@pytest.mark.parametrize("options", [{}, {"window": "7"}], ids=["the same", "others"])
def test_a_kept_publisher_that_has_failed_fails_no_task(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    send(settings_for(fake), rows(1))
    kept = connection._kept
    assert kept is not None
    with monkeypatch.context() as patched:
        patched.setattr(Relay, "turn", Mock(side_effect=ZeroDivisionError("a bug")))
        until(lambda: kept.lent.publisher.status.link is Link.FAILED)
    assert send(settings_for(fake, **options), rows(2))[0].counts.confirmed == 2


def test_an_idle_connection_is_closed(fake: FakeBroker) -> None:
    send(settings_for(fake, idleTimeout="0.05"), rows(1))
    fake.wait_for(lambda: fake.connections == 0, timeout_s=60)
    send(settings_for(fake, idleTimeout="0.05"), rows(1))
    assert fake.published_count == 2


def test_a_connection_is_not_kept_where_they_are_counted(fake: FakeBroker) -> None:
    send(settings_for(fake, maxConnections="1"), rows(1))
    fake.wait_for(lambda: fake.connections == 0, timeout_s=60)


def test_a_failed_task_leaves_nothing_on_its_way(fake: FakeBroker) -> None:
    fake.inject(HoldConfirms())
    with pytest.raises(PartitionStalled):
        send(settings_for(fake, deliveryTimeout="1", window="10"), rows(500))
    fake.wait_for(lambda: fake.connections == 0, timeout_s=60)
    before = fake.published_count
    time.sleep(0.2)
    assert 0 < before < 500
    assert fake.published_count == before


def test_a_broker_that_asks_for_a_certificate(tmp_path: Path) -> None:
    both = signed(tmp_path, "DNS:localhost", "IP:127.0.0.1")
    files = {"caFile": both.with_name("ca.crt"), "certFile": both, "keyFile": both}
    tls = broker_with(both, asks=True)
    try:
        settings = settings_for(tls, **{name: str(path) for name, path in files.items()})
        assert send(settings, rows(3))[0].counts.confirmed == 3
    finally:
        connection.close_idle()
        tls.stop()


def test_a_rate_is_kept(fake: FakeBroker) -> None:
    settings = settings_for(fake)
    assert slice_rows(100.0) == 10
    since = time.monotonic()
    with connection.publisher(settings) as lent:
        sending = Sending(lent, settings, partition=7, rate=100.0)
        for _ in range(4):
            assert not list(sending.send(rows(10), sending.counts.rows))
        assert not list(sending.finish())
    assert time.monotonic() - since >= 0.3  # 100 a second: three waits of 0.1 s


def test_small_tasks_one_after_another_keep_the_rate_together(fake: FakeBroker) -> None:
    settings = settings_for(fake)
    since = time.monotonic()
    for _ in range(4):
        with connection.publisher(settings) as lent:
            sending = Sending(lent, settings, partition=7, rate=10.0)
            assert not list(sending.send(rows(1), 0))
            assert not list(sending.finish())
    assert time.monotonic() - since >= 0.4


def test_without_a_url_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELIABLEPUB_URL", raising=False)
    with pytest.raises(ConfigurationError, match="no broker"), connection.publisher(Settings()):
        pytest.fail("there is no publisher")
