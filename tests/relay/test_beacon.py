"""What a relay shows of itself, and when."""

import errno
import json
import os
from contextlib import closing
from dataclasses import asdict
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from reliablepub.outbox.database import IS_LAST
from reliablepub.outbox.entry import Counters
from reliablepub.outbox.shown import FIELDS
from reliablepub.outbox.sqlite import status_file
from reliablepub.outbox.sqlite.lock import RelayLock
from reliablepub.outbox.sqlite.status_file import (
    relaying,
    remove_status_file,
    status_file_path,
    write_status_file,
)
from reliablepub.outbox.sqlite.store import SqliteStore
from reliablepub.relay.status import (
    Beacon,
    Link,
    Paused,
    Percentiles,
    Status,
    failed_status,
    silent_s,
)


@pytest.fixture
def shown() -> list[Any]:
    return []


class Clocks:
    now = 100.0


@pytest.fixture
def beacon(shown: list[Any]) -> Beacon:
    latency = Percentiles(3, 0.001, 0.002, 0.003, 0.004)
    return Beacon(
        *(shown.append, lambda: latency, {"nacked": 60.0}),
        wall=lambda: Clocks.now + 1000,
        monotonic=lambda: Clocks.now,
    )


def at(now: float) -> None:
    Clocks.now = now


def test_a_change_of_the_connection_is_shown_at_once(beacon: Beacon, shown: list[Any]) -> None:
    at(100.0)
    beacon.turned(Status(Link.CONNECTED))
    at(100.1)
    beacon.turned(Status(Link.BLOCKED, "memory"))
    assert [(p["link"], p["reason"], p["since"]) for p in shown] == [
        ("connected", "", 1100.0),
        ("blocked", "memory", 1100.1),
    ]


def test_trying_again_is_no_change(beacon: Beacon, shown: list[Any]) -> None:
    for n, link in enumerate([Link.DISCONNECTED, Link.CONNECTING] * 3):
        at(100.0 + 2 * n)
        beacon.turned(Status(link, "refused"))
    assert {(p["link"], p["since"]) for p in shown} == {("disconnected", 1100.0)}


def test_another_reason_begins_no_other_outage(beacon: Beacon, shown: list[Any]) -> None:
    for n, reason in enumerate(["", "one: refused", "two: refused"] * 3):
        at(100.0 + n)
        beacon.turned(Status(Link.CONNECTING if n % 2 else Link.DISCONNECTED, reason))
    assert {p["since"] for p in shown} == {1100.0}
    assert [p["reason"] for p in shown[-2:]] == ["one: refused", "two: refused"]


def test_trouble_of_a_connected_relay_has_its_own_age(beacon: Beacon, shown: list[Any]) -> None:
    for now, reason in ((100.0, ""), (105.0, "disk full"), (107.0, "")):
        at(now)
        beacon.turned(Status(Link.CONNECTED, reason))
    assert [p["since"] for p in shown] == [1100.0, 1105.0, 1107.0]


@pytest.mark.parametrize(("stored", "beats"), [(0, 1), (1, 4)])
def test_while_messages_are_open_it_shows_that_it_is_alive(
    beacon: Beacon, shown: list[Any], stored: int, beats: int
) -> None:
    for n in range(40):
        at(100.0 + n)
        beacon.turned(Status(Link.CONNECTED, counters=Counters(stored=stored)))
    assert len(shown) == beats


@pytest.mark.parametrize(
    ("at", "oldest", "silent"),
    [
        (969.0, 900.0, 31.0),
        (971.0, 900.0, None),
        (0.0, 971.0, None),  # it was idle; a message has just come
        (0.0, None, None),
        (None, 900.0, None),
        (2_000.0, 900.0, None),  # the clock was set back
    ],
)
def test_a_relay_is_silent_if_it_has_work_and_shows_no_life(
    at: float | None, oldest: float | None, silent: float | None
) -> None:
    assert silent_s({"at": at}, oldest, 1_000.0) == silent


def test_a_reason_of_any_length_can_be_read(tmp_path: Path) -> None:
    status = Status(Link.FAILED, "\U0001f600" * 100_000)
    write_status_file(tmp_path / "o.db", {**failed_status(status, 1.0), IS_LAST: True})
    assert relaying(tmp_path / "o.db").status["link"] == "failed"


def test_figures_are_shown_once_a_second_and_only_new_ones(
    beacon: Beacon, shown: list[Any]
) -> None:
    for now, in_flight in [(100.0, 1), (100.5, 2), (101.0, 3), (105.0, 3), (106.0, 3)]:
        at(now)
        beacon.turned(Status(Link.CONNECTED, in_flight=in_flight, window=32 * in_flight))
    assert [(p["in_flight"], p["window"]) for p in shown] == [(1, 32), (3, 96)]
    assert shown[0]["latency"] == {
        "confirms": 3,
        "p50_s": 0.001,
        "p95_s": 0.002,
        "p99_s": 0.003,
        "max_s": 0.004,
    }


def test_only_the_picture_of_the_relay_at_work_counts(tmp_path: Path) -> None:
    outbox = tmp_path / "o.db"
    write_status_file(outbox, {"link": "connected"})
    assert not relaying(outbox).status, "no relay runs"
    relay_lock = RelayLock(outbox)
    assert relaying(outbox).status == {"pid": os.getpid(), "link": "connected"}
    assert status_file_path(outbox).stat().st_mode & 0o777 == 0o600
    status_file_path(outbox).write_text(json.dumps({"pid": 1, "link": "connected"}))
    assert not relaying(outbox).status, "it is of a relay that is dead"
    for text in ("{", "[]", "\udcff"):
        status_file_path(outbox).write_text(text, errors="surrogateescape")
        assert not relaying(outbox).status
    write_status_file(outbox, {"link": "blocked"})
    assert relaying(outbox).status == {"pid": os.getpid(), "link": "blocked"}, "replaced as a whole"
    assert {file.name for file in tmp_path.iterdir()} == {"o.db.relay", "o.db.lock"}
    remove_status_file(outbox)
    assert not relaying(outbox).status
    assert not status_file_path(outbox).exists()
    relay_lock.release()


MISTYPED: tuple[object, ...] = ({}, ["x"], True)
PAUSED = Paused("orders", None, 3, 1.0, 900.0, "312 NO_ROUTE", 7)


def written(**changes: object) -> dict[str, object]:
    status = Status(Link.FAILED, "a bug", paused=(PAUSED,), paused_destinations=1)
    latency = asdict(Percentiles(3, 1e-3, 2e-3, 3e-3, 4e-3))
    return {**failed_status(status, 1.0), "latency": latency, **changes}


@pytest.mark.parametrize(
    "forged",
    [
        *({name: value} for name in FIELDS for value in MISTYPED if name != "lasts" or value),
        {"lasts": {"nacked": "soon"}},
        *({name: None} for name in FIELDS if name not in {"latency", "rate_max"}),
        *({"paused": [asdict(PAUSED) | {name: ["x"]}]} for name in ("exchange", "routing_key")),
        *({name: [{}]} for name in ("latency", "paused")),
        *({"at": at} for at in (inf, -inf, nan, 10**400)),
    ],
)
def test_a_status_that_no_relay_has_written_is_none(tmp_path: Path, forged: dict[str, Any]) -> None:
    """Its readers look at no type again."""
    path = status_file_path(tmp_path / "o.db")
    for values, is_one in ((written(), True), (written(**forged), False)):
        path.write_text(json.dumps({"pid": os.getpid(), IS_LAST: True, **values}))
        path.chmod(0o600)
        assert bool(relaying(tmp_path / "o.db").status) is is_one


def test_each_field_that_a_relay_shows_is_known() -> None:
    assert written().keys() == FIELDS.keys()


def test_a_draft_that_was_left_is_replaced(tmp_path: Path) -> None:
    outbox = tmp_path / "o.db"
    (tmp_path / "o.db.relay.new").write_text("half of")
    write_status_file(outbox, {})
    assert json.loads(status_file_path(outbox).read_text()) == {"pid": os.getpid()}
    assert not (tmp_path / "o.db.relay.new").exists()


def test_on_a_full_disk_no_old_status_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = tmp_path / "o.db"
    write_status_file(outbox, {"link": "connected"})
    relay_lock = RelayLock(outbox)
    replaced = status_file._replace
    left = [1]

    def full(path: Path, text: str) -> None:
        if left:
            left.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        replaced(path, text)

    monkeypatch.setattr(status_file, "_replace", full)
    write_status_file(outbox, {"link": "blocked"})
    assert relaying(outbox).status["link"] == "blocked", "in the space of the old one"
    left += [1, 1]
    write_status_file(outbox, {"link": "connected"})
    assert not relaying(outbox).status
    assert {file.name for file in tmp_path.iterdir()} == {"o.db.lock"}
    relay_lock.release()


@pytest.mark.parametrize("is_last", [False, True])
def test_the_status_of_a_predecessor_with_the_same_process_id_does_not_count(
    tmp_path: Path, *, is_last: bool
) -> None:
    outbox = tmp_path / "o.db"
    write_status_file(outbox, {"link": "connected"} | ({IS_LAST: True} if is_last else {}))
    with closing(SqliteStore(outbox)):  # in a container, both are process 1
        assert not relaying(outbox).status


def test_a_status_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    write_status_file(tmp_path / "nowhere" / "o.db", {})
    remove_status_file(tmp_path / "nowhere" / "o.db")
