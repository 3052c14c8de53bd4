"""When to stop waiting: progress renews it, and a broker that was never there gets less."""

from reliablepub.cli.publish.run import CONNECT_S, Patience
from reliablepub.outbox.entry import Counters
from reliablepub.relay.status import Status


def status(confirmed: int, *, connects: int = 1) -> Status:
    return Status(counters=Counters(stored=10, confirmed=confirmed), connects=connects)


def test_it_runs_out_without_progress() -> None:
    patience = Patience(30, now=100)
    assert not patience.is_over(status(0), now=129.9)
    assert patience.is_over(status(0), now=130)


def test_progress_renews_it() -> None:
    patience = Patience(30, now=100)
    assert not patience.is_over(status(1), now=129)
    assert not patience.is_over(status(1), now=158)
    assert patience.is_over(status(1), now=159)


def test_a_broker_that_was_never_reached_gets_less() -> None:
    patience = Patience(30, now=100)
    assert not patience.is_over(status(0, connects=0), now=100 + CONNECT_S - 0.1)
    assert patience.is_over(status(0, connects=0), now=100 + CONNECT_S)
    assert not patience.is_over(status(0, connects=1), now=100 + CONNECT_S)


def test_the_shorter_limit_counts() -> None:
    assert Patience(2, now=0).is_over(status(0, connects=0), now=2)
