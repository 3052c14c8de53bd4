"""Files of an outbox go away under a live process: each later call raises, or its message is there.

Every act by every door. The application is then killed, as a crash would, and what a new process
finds under the path is compared with what the application was told.
"""

import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest

from reliablepub import (
    ConfigurationError,
    Message,
    Outbox,
    OutboxMoved,
    Publisher,
    PublisherClosed,
    PublisherFailed,
)
from reliablepub.outbox.sqlite import location
from tests.sqlite import sql, writer_of
from tests.surroundings.app import CALLS, DOORS, NOWHERE, RELAYING, App
from tests.waiting import until

GONE = (OutboxMoved, PublisherClosed)
"""What a call gets that the relay's end has overtaken, or has not."""


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def unlink(path: Path) -> None:
    path.unlink()


def unlink_all(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        beside(path, suffix).unlink(missing_ok=True)


def unlink_log(path: Path) -> None:
    beside(path, "-wal").unlink(missing_ok=True)


def unlink_index(path: Path) -> None:
    beside(path, "-shm").unlink(missing_ok=True)


def move(path: Path) -> None:
    path.rename(beside(path, ".moved"))


def move_all(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        if beside(path, suffix).exists():
            beside(path, suffix).rename(path.with_name("elsewhere.db" + suffix))


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def replace(path: Path) -> None:
    """By a backup, as ``mv`` would."""
    backup = beside(path, ".backup")
    make_backup = "import sys, reliablepub as r; r.Outbox(sys.argv[1]).enqueue(r.Message(b''))"
    subprocess.run([sys.executable, "-c", make_backup, backup], check=True)
    backup.replace(path)


def replace_log(path: Path) -> None:
    log = beside(path, "-wal")
    if not log.exists():
        return  # in rollback mode there is none
    shutil.copy(log, beside(path, ".log"))
    beside(path, ".log").replace(log)


ACTS = (
    *(unlink, unlink_all, unlink_log, unlink_index, replace, replace_log),
    *(move, move_all, move_folder),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "outbox.db"


def ids_at(path: Path) -> set[str]:
    """What a new process finds, by plain SQLite."""
    if not path.exists():
        return set()
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE name = 'reliablepub_messages'"
        ).fetchone():
            return set()
        return {id_ for (id_,) in connection.execute("SELECT message_id FROM reliablepub_messages")}


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_called_stored_afterwards_is_there(
    path: Path, door: str, act: Callable[[Path], None]
) -> None:
    judge(path, door, act)


@pytest.mark.parametrize("door", DOORS)
def test_a_link_to_the_folder_is_switched(tmp_path: Path, door: str) -> None:
    """As a deployment does that links ``current`` to its newest release."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "current"
    link.symlink_to("first")

    def switch(_path: Path) -> None:
        (tmp_path / "next").symlink_to("second")
        (tmp_path / "next").replace(link)

    judge(link / "outbox.db", door, switch)


def judge(path: Path, door: str, act: Callable[[Path], None]) -> None:
    """Act between two calls; whatever a call says is stored, the next process finds."""
    with App(door, path) as app:
        before = app.round()
        assert len(before.stored) == CALLS, before
        act(path)
        after = [app.round(), app.round()]
    assert all(told.is_complete for told in after)
    assert {id_ for told in after for id_ in told.stored} <= ids_at(path), after
    if door in RELAYING:
        assert not after[1].stored, "a relay stops"
        if act is not move_folder:
            [rescued] = path.parent.glob("outbox.db.rescued-*")
            assert rescued.stat().st_mode & 0o777 == 0o600
            assert set(before.stored) <= ids_at(rescued)


STORMS = int(os.environ.get("RELIABLEPUB_STORMS", "300"))
"""How many the long form runs: some ten minutes."""


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
@pytest.mark.parametrize("door", ["publish", "enqueue"])
def test_calls_under_way_are_told_the_truth(
    path: Path, door: str, act: Callable[[Path], None]
) -> None:
    storm(path, door, act, 0.1)


@pytest.mark.soak
def test_calls_under_way_are_told_the_truth_again_and_again(tmp_path: Path) -> None:
    chance = random.Random()
    for n in range(STORMS):
        folder = tmp_path / str(n) / "data"
        folder.mkdir(parents=True)
        storm(folder / "outbox.db", chance.choice(DOORS), chance.choice(ACTS), chance.random() / 2)


def storm(path: Path, door: str, act: Callable[[Path], None], after_s: float) -> None:
    """Let calls go on without a pause, and act at some moment of theirs."""
    rounds = 40
    with App(door, path) as app:
        app.round()
        app.begin(*[""] * rounds)
        time.sleep(after_s)
        act(path)
        acted = time.monotonic()
        told = [app.told() for _ in range(rounds)]
        told.append(app.round())  # the last calls come after the act in any case
    assert all(one.is_complete for one in told)
    later = {id_ for one in told for id_, began in one.began.items() if began > acted}
    assert later <= ids_at(path), (door, act.__name__)
    if door in RELAYING:
        stored = {id_ for one in told for id_ in one.stored}
        # Where it was, where it was moved to, and the copy that the relay has left.
        files = [file for file in path.parent.parent.rglob("*") if is_database(file)]
        assert stored <= set().union(*map(ids_at, files)), (door, act.__name__)


def is_database(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(16) == b"SQLite format 3\0"


def test_an_idle_relay_notices_it_too(path: Path) -> None:
    publisher = Publisher(NOWHERE, outbox=path, close_timeout_s=0.0)
    publisher.publish(b"", message_id="before")
    path.unlink()
    until(lambda: publisher._client.relay.is_ended)
    with pytest.raises(GONE, match=r"was deleted or moved .*rescued-1: bring"):
        publisher.publish(b"")
    with pytest.raises(PublisherFailed):
        publisher.close()
    [rescued] = path.parent.glob("outbox.db.rescued-*")
    assert ids_at(rescued) == {"before"}
    assert not path.exists(), "closing does not make an empty outbox there"


def test_a_name_that_is_not_utf_8_is_rescued_too(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.db")
    publisher = Publisher(NOWHERE, outbox=path, close_timeout_s=0.0)
    publisher.publish(b"", message_id="before")
    path.unlink()
    with pytest.raises(GONE, match=r"rescued-1: bring"):
        publisher.publish(b"")
    with pytest.raises(PublisherFailed):
        publisher.close()
    assert "before" in ids_at(beside(path, ".rescued-1").rename(tmp_path / "rescued.db"))


def test_a_copy_that_cannot_be_made_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(NOWHERE, outbox=path, close_timeout_s=0.0)

    def taken(first: Path) -> Path:
        first.write_bytes(b"no room")
        return first

    monkeypatch.setattr(location, "_created", taken)
    path.unlink()
    with pytest.raises(GONE, match="could not be copied to "):
        publisher.publish(b"")
    with pytest.raises(PublisherFailed):
        publisher.close()
    assert not path.with_name("outbox.db.rescued-1").exists(), "nobody takes it for a copy"


def test_each_rescue_makes_a_copy_of_its_own(path: Path) -> None:
    """A file that is made anew counts its runs anew."""
    for message_id in ("first", "second"):
        publisher = Publisher(NOWHERE, outbox=path, close_timeout_s=0.0)
        publisher.publish(b"", message_id=message_id)
        unlink_all(path)
        with pytest.raises(PublisherFailed):
            until(lambda: publisher.flush(0) is None)  # noqa: B023 - of this round
    copies = sorted(path.parent.glob("outbox.db.rescued-*"))
    assert [ids_at(copy) for copy in copies] == [{"first"}, {"second"}]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("level", ["DEFERRED", None])
def test_a_connection_to_the_old_file_is_not_taken_for_one_to_the_new_file(
    path: Path, level: Literal["DEFERRED"] | None, *, is_known: bool
) -> None:
    """Another thread of the process has opened the new file: its inodes are open too."""
    with closing(sqlite3.connect(path, isolation_level=level)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.execute("CREATE TABLE orders (id TEXT)")
        if is_known:
            with old:
                Outbox(path).enqueue(Message(b"", message_id="before"), connection=old)
        move_all(path)
        Outbox(path).enqueue(Message(b"", message_id="backup"))
        with closing(sqlite3.connect(path)) as new:
            with new:
                Outbox(path).enqueue(Message(b"", message_id="new"), connection=new)
            for outbox in (Outbox(path), Outbox(path)):
                with pytest.raises(OutboxMoved), old:
                    outbox.enqueue(Message(b"", message_id="lost"), connection=old)
    assert ids_at(path) == {"backup", "new"}
    assert ids_at(path.with_name("elsewhere.db")) == ({"before"} if is_known else set())


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("mode", ["DELETE", "MEMORY", "OFF"])
def test_a_connection_without_a_log_to_the_old_file_is_not_taken_for_one_to_the_new_file(
    path: Path, mode: str, *, spills: bool, is_kept: bool
) -> None:
    with closing(sqlite3.connect(path)) as first, first:
        Outbox(path).create(connection=first)
        first.execute("CREATE TABLE orders (id TEXT)")
    copy = Path(shutil.copy(path, path.with_name("copy.db")))
    with closing(sqlite3.connect(path)) as old:
        old.execute(f"PRAGMA journal_mode = {mode}")
        old.execute("PRAGMA cache_size = 1")
        old.executemany("INSERT INTO orders VALUES (?)", [("x" * 5_000,)] * (50 * spills + 1))
        if is_kept:
            path.rename(path.with_name("elsewhere.db"))
        copy.rename(path)
        with closing(sqlite3.connect(path)) as new:
            new.execute("SELECT * FROM orders").fetchall()
            with pytest.raises(OutboxMoved, match=r"db is not the file that the connection has"):
                Outbox(path).enqueue(Message(b"", message_id="lost"), connection=old)
            with new:
                Outbox(path).enqueue(Message(b"", message_id="new"), connection=new)
    assert ids_at(path) == {"new"}


def test_a_connection_without_a_log_may_be_one_of_many(path: Path) -> None:
    with (
        closing(sqlite3.connect(path)) as one,
        closing(sqlite3.connect(path)) as other,
        closing(sqlite3.connect(path.with_name("app.db"))) as app,
    ):
        app.execute("CREATE TABLE orders (id TEXT)")
        app.execute("INSERT INTO orders VALUES ('open')")
        for n, connection in enumerate((one, other)):
            with connection:
                Outbox(path).enqueue(Message(b"", message_id=f"{n}"), connection=connection)
    assert ids_at(path) == {"0", "1"}


def test_a_connection_that_locks_its_file_for_good_is_one_to_this_file(path: Path) -> None:
    """It takes no lock in the index of the log, by which other connections are known."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id TEXT)")
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        with connection:
            Outbox(path).enqueue(Message(b"", message_id="stored"), connection=connection)
    assert ids_at(path) == {"stored"}


def test_a_system_that_does_not_list_locks_refuses_no_connection(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a file system that lists none, as FUSE does if its daemon handles them."""
    monkeypatch.setattr(location, "_has_lock", lambda *_: False)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            Outbox(path).enqueue(Message(b"", message_id="stored"), connection=connection)
    assert ids_at(path) == {"stored"}


def test_a_connection_whose_database_was_exchanged_is_to_another_file(path: Path) -> None:
    outbox = Outbox(path)
    with closing(sqlite3.connect(path)) as connection:
        with connection:
            outbox.enqueue(b"", connection=connection)
        connection.deserialize(connection.serialize())
        with pytest.raises(ConfigurationError, match="connection is to "):
            outbox.enqueue(b"", connection=connection)


def test_a_log_that_is_truncated_while_it_is_looked_at_was_not_deleted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``PRAGMA wal_checkpoint(TRUNCATE)`` of another process does."""
    read = location._read_each

    def truncated_then(fds: Sequence[int], count: int, offset: int) -> list[bytes]:
        found = read(fds, count, offset)
        if offset == location._FRAMES_AT:
            looks.append(offset)
            sql(path, "PRAGMA wal_checkpoint(TRUNCATE)")
        return found

    looks: list[int] = []
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
        monkeypatch.setattr(location, "_read_each", truncated_then)
        location.Place(path, is_logged=True)
    assert len(looks) > 1


def test_a_file_that_is_replaced_after_a_fork_has_closed_it_is_used_after_one_error(
    path: Path,
) -> None:
    with closing(Outbox(path)) as outbox:
        outbox.enqueue(Message(b"x"))
        writer_of(outbox).rest()
        replace(path)
        with pytest.raises(OutboxMoved, match="was replaced by another file"):
            outbox.enqueue(Message(b"x"))
        assert outbox.enqueue(Message(b"x")) in ids_at(path)


def test_a_file_that_is_moved_after_the_commit_may_have_the_message(path: Path) -> None:
    commits = 0

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            nonlocal commits
            done = super().execute(sql, *values)
            commits += sql == "COMMIT"
            if sql == "COMMIT" and commits == 2:
                for suffix in ("", "-wal", "-shm"):
                    beside(path, suffix).rename(beside(path, f".old{suffix}"))
                shutil.copy(beside(path, ".old"), path)  # which this process does not have open
            return done

    outbox = Outbox(path)
    with closing(sqlite3.connect(path, isolation_level=None, factory=Connection)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        outbox.enqueue(b"", connection=connection)
        with pytest.raises(OutboxMoved) as error:
            outbox.enqueue(b"", connection=connection)
    assert commits == 2
    assert "nothing was stored" not in str(error.value)


def test_a_connection_that_switches_its_journal_has_the_files_of_before(path: Path) -> None:
    outbox, modes = Outbox(path), ("wal", "delete", "wal", "delete")
    with closing(sqlite3.connect(path)) as connection:
        for n, mode in enumerate(modes):
            connection.execute(f"PRAGMA journal_mode = {mode}")
            with connection:
                outbox.enqueue(Message(b"", message_id=f"{n}"), connection=connection)
    assert ids_at(path) == {"0", "1", "2", "3"}
