"""What another user can do who can write to the directory of an outbox: each as that user."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from reliablepub.cli.app import main
from reliablepub.errors import OutboxError
from reliablepub.message import Message
from reliablepub.outbox.entry import Changes
from reliablepub.outbox.outbox import Outbox
from reliablepub.outbox.sqlite import location
from reliablepub.outbox.sqlite.forks import open_files
from reliablepub.outbox.sqlite.location import OF_SQLITE, OURS, check_side_files, warn_of_folder
from reliablepub.outbox.sqlite.lock import RelayLock, holder_pid
from reliablepub.outbox.sqlite.space import Ballast
from reliablepub.outbox.sqlite.status_file import STATUS_BYTES_MAX, relaying, status_file_path
from reliablepub.outbox.sqlite.store import SqliteStore
from tests.missing import miss
from tests.outbox.conftest import Make
from tests.sqlite import sql

STRANGER = 65534
OWNER = 4321
BODY = b"for the eyes of the owner" * 40

Plant = Callable[[str], str]


@pytest.fixture
def shared() -> Iterator[Path]:
    """An outbox in a directory like /tmp: users can create files there, and remove their own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder / "p.db"
    shutil.rmtree(folder)


@pytest.fixture
def stranger(shared: Path) -> Iterator[Plant]:
    """Run lines of shell in the shared directory, as another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with subprocess.Popen(
        ["/bin/sh"],
        cwd=shared.parent,
        user=STRANGER,
        group=STRANGER,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        stdin, stdout = shell.stdin, shell.stdout

        def run(line: str) -> str:
            stdin.write(f"umask 0; {line}\necho END\n")
            stdin.flush()
            return "".join(iter(stdout.readline, "END\n"))

        yield run


def fill(path: Path, entry: Make) -> None:
    with closing(SqliteStore(path)) as store:
        store.commit(Changes(new=[entry(body=BODY)]))


@pytest.mark.parametrize("is_there", [False, True], ids=["no outbox", "an outbox"])
@pytest.mark.parametrize("suffix", [*OF_SQLITE, *OURS])
def test_a_planted_file_is_not_adopted(
    shared: Path, stranger: Plant, entry: Make, suffix: str, *, is_there: bool
) -> None:
    uses: list[Callable[[], object]] = [
        lambda: SqliteStore(shared),
        lambda: Outbox(shared).enqueue(Message(BODY)),
    ]
    planted = shared.with_name(f"p.db{suffix}")
    if is_there:
        fill(shared, entry)
        planted.unlink(missing_ok=True)
        uses.append(lambda: Outbox(shared).status())
        uses.append(lambda: Outbox(shared.with_name("new.db")).salvage(shared))
    stranger(f": > p.db{suffix}")
    for use in uses:
        with pytest.raises(OutboxError, match=f"p.db{suffix} belongs to user {STRANGER}"):
            use()
    assert planted.read_bytes() == b""


def test_a_log_that_is_planted_in_between_is_found_before_a_message_is_in_it(
    shared: Path, stranger: Plant, child: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = location.check_side_files
    looks = 0

    def late(outbox: Path, *more: tuple[str, ...]) -> None:
        nonlocal looks
        looks += 1
        check(outbox, *more)
        if looks == 1:
            stranger(": > p.db-wal; : > p.db-shm")

    def victim() -> None:
        """Not root, for whom SQLite would take the file over."""
        os.setuid(OWNER)
        with Outbox(shared) as outbox:
            outbox.enqueue(Message(b""))
        monkeypatch.setattr("reliablepub.outbox.sqlite.connections.check_side_files", late)
        with pytest.raises(OutboxError, match=f"p.db-wal belongs to user {STRANGER}"):
            Outbox(shared).enqueue(Message(BODY))
        assert looks == 2

    assert child(victim) == 0
    assert int(stranger("wc -c < p.db-wal")) == 0


BEFORE_SQLITE = {(1, False), (2, False), (1, True), (3, True)}
"""Looks, and whether the outbox is new, after which there is still something to plant."""


@pytest.mark.parametrize("at_look", [1, 2, 3, 4])
@pytest.mark.parametrize("is_new", [False, True])
def test_root_takes_over_no_log_that_is_planted_in_between(
    shared: Path,
    stranger: Plant,
    monkeypatch: pytest.MonkeyPatch,
    at_look: int,
    is_new: bool,  # noqa: FBT001 - pytest's
) -> None:
    """SQLite, run by root, would make it the owner's; and the stranger has it open."""
    if not is_new:
        with Outbox(shared) as outbox:
            outbox.enqueue(Message(b""))
    check = location.check_side_files
    looks = 0
    owners: list[int] = []

    def late(outbox: Path, *more: tuple[str, ...]) -> None:
        nonlocal looks
        looks += 1
        check(outbox, *more)
        if looks == at_look:
            stranger(
                "for s in wal shm; do [ -e p.db-$s ] || : > p.db-$s; done; "
                "[ -r p.db-wal ] && exec 3<p.db-wal; :"
            )
            owners.extend(shared.with_name(f"p.db-{s}").stat().st_uid for s in ("wal", "shm"))

    monkeypatch.setattr("reliablepub.outbox.sqlite.connections.check_side_files", late)
    monkeypatch.setattr("reliablepub.outbox.sqlite.location.check_side_files", late)
    for use in (lambda: Outbox(shared).enqueue(Message(BODY)), lambda: SqliteStore(shared).close()):
        with suppress(OutboxError):
            use()
    assert (STRANGER in owners) == ((at_look, is_new) in BEFORE_SQLITE)
    assert owners, "nobody looked so often"
    assert int(stranger(f"[ -e /dev/fd/3 ] && grep -c -a '{BODY[:25].decode()}' <&3") or 0) == 0


def test_root_can_share_an_application_s_database(shared: Path, stranger: Plant) -> None:
    sql(shared, "CREATE TABLE t (a)", "INSERT INTO t VALUES (7)")
    for _ in range(2):
        with Outbox(shared) as outbox:
            outbox.enqueue(Message(BODY))
    assert Outbox(shared).status().open == 2
    assert Outbox(shared).audit().is_right
    with closing(sqlite3.connect(shared)) as connection:
        assert connection.execute("SELECT a FROM t").fetchall() == [(7,)]
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_without_the_look_the_stranger_would_read_along(
    shared: Path, stranger: Plant, child: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def victim() -> None:
        os.setuid(OWNER)
        with Outbox(shared) as outbox:
            outbox.enqueue(Message(b""))
        stranger(": > p.db-wal; : > p.db-shm")
        monkeypatch.setattr(
            "reliablepub.outbox.sqlite.connections.check_side_files", lambda *_: None
        )
        with Outbox(shared) as outbox:
            outbox.enqueue(Message(BODY))
            assert int(stranger(f"grep -c -a '{BODY[:25].decode()}' p.db-wal")) > 0

    assert child(victim) == 0


@pytest.mark.parametrize("suffix", [*OF_SQLITE, *OURS])
def test_a_pipe_does_not_block(path: Path, entry: Make, suffix: str) -> None:
    fill(path, entry)
    beside = path.with_name(f"outbox.db{suffix}")
    beside.unlink(missing_ok=True)
    os.mkfifo(beside, 0o600)
    for use in (lambda: Outbox(path).status(), lambda: SqliteStore(path)):
        with pytest.raises(OutboxError, match=f"outbox.db{suffix} is not a regular file"):
            use()
    assert holder_pid(path) is None
    assert not relaying(path).status
    assert RelayLock.borrow(path) is None or suffix != ".lock"


def test_nor_does_the_command_line(path: Path, entry: Make) -> None:
    fill(path, entry)
    lock = path.with_name("outbox.db.lock")
    lock.unlink()
    os.mkfifo(lock)
    command = [sys.executable, "-m", "reliablepub", "outbox", "status", "--outbox", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 4
    assert "outbox.db.lock is not a regular file" in ended.stderr


@pytest.mark.parametrize("suffix", [*OF_SQLITE, *OURS])
def test_a_link_and_a_second_name_are_refused(path: Path, entry: Make, suffix: str) -> None:
    fill(path, entry)
    beside, other = path.with_name(f"outbox.db{suffix}"), path.with_name("other")
    beside.unlink(missing_ok=True)
    other.touch(mode=0o600)
    beside.symlink_to(other)
    with pytest.raises(OutboxError, match="is a symbolic link"):
        SqliteStore(path)
    beside.unlink()
    beside.hardlink_to(other)
    with pytest.raises(OutboxError, match="has a second name"):
        SqliteStore(path)
    assert other.read_bytes() == b""


@pytest.mark.parametrize("suffix", [*OF_SQLITE, *OURS])
def test_a_mode_looser_than_that_of_the_outbox_is_refused(
    path: Path, entry: Make, suffix: str
) -> None:
    fill(path, entry)
    beside = path.with_name(f"outbox.db{suffix}")
    beside.touch()
    beside.chmod(0o640)
    with pytest.raises(OutboxError, match=r"has mode 0640.* chmod 600 "):
        SqliteStore(path)
    beside.chmod(0o600)
    check_side_files(path)
    path.chmod(0o640)
    beside.chmod(0o640)
    check_side_files(path)
    beside.chmod(0o644)
    with pytest.raises(OutboxError, match=r"has mode 0644.* chmod 640 "):
        check_side_files(path)


def test_who_may_write_to_the_outbox_may_own_its_log(path: Path, stranger: Plant) -> None:
    path.touch()
    log = path.with_name("outbox.db-wal")
    log.touch(mode=0o600)
    os.chown(log, STRANGER, STRANGER)
    for mode, group, is_fine in (
        (0o600, STRANGER, False),
        (0o660, os.getegid(), False),
        (0o660, STRANGER, True),  # a database that a group shares
        (0o666, os.getegid(), True),
    ):
        os.chown(path, os.geteuid(), group)
        path.chmod(mode)
        if is_fine:
            check_side_files(path)
        else:
            with pytest.raises(OutboxError, match="belongs to user"):
                check_side_files(path)
    os.chown(path, STRANGER, STRANGER)
    path.chmod(0o600)
    os.chown(log, 0, 0)
    check_side_files(path)  # the administrator's
    os.chown(log, 4321, 4321)  # a user without a name
    path.chmod(0o660)
    with pytest.raises(OutboxError, match="belongs to user 4321"):
        check_side_files(path)


@pytest.fixture
def of_owner(shared: Path) -> Path:
    """An outbox of `OWNER` that the members of a group can read and write."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with Outbox(shared) as outbox:
        outbox.enqueue(Message(BODY, routing_key="q"))
    shared.chmod(0o660)
    for file in (shared.parent, *shared.parent.iterdir()):
        os.chown(file, OWNER, STRANGER)
    shared.parent.chmod(0o2770)
    return shared


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(user)


def files_at(path: Path) -> dict[str, int]:
    """The owner of each file in the directory."""
    return {file.name: file.stat().st_uid for file in path.parent.iterdir()}


LOOKS = ("outbox status", "outbox list", "outbox audit", "outbox check", "doctor")


def look(path: Path, command: str) -> str:
    """Run a command that changes nothing, and return its errors; `doctor` has findings."""
    if command != "doctor":
        return CliRunner().invoke(main, [*command.split(), "--outbox", str(path)]).stderr
    rows = json.loads(CliRunner().invoke(main, ["doctor", "--json", "--outbox", str(path)]).stdout)
    return "".join(row["found"] for row in rows if row["check"] == "outbox")


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_of_another_user_is_refused_and_leaves_nothing(
    of_owner: Path, child: Callable[..., int], command: str
) -> None:
    before = files_at(of_owner)
    look(of_owner.with_name("missing.db"), command)  # that user may not import the modules

    def run() -> None:
        become(OWNER + 1)
        told = look(of_owner, command)
        assert f"outbox {of_owner} belongs to user {OWNER}" in told
        assert f"as root: chown {OWNER + 1} {of_owner} {of_owner}.ballast" in told

    assert child(run) == 0
    assert files_at(of_owner) == before


@pytest.mark.parametrize("command", LOOKS)
def test_a_look_of_root_leaves_only_files_of_the_owner(of_owner: Path, command: str) -> None:
    assert look(of_owner, command) == ""
    assert set(files_at(of_owner).values()) == {OWNER}


def test_root_that_may_not_give_files_away_leaves_none(
    of_owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_at(of_owner)
    monkeypatch.setattr(os, "fchown", Mock(side_effect=PermissionError))
    assert "may not give files to that user (CAP_CHOWN)" in look(of_owner, "outbox status")
    assert files_at(of_owner) == before


def test_an_outbox_goes_to_another_user_by_the_command_in_the_error(
    of_owner: Path, child: Callable[..., int]
) -> None:
    with pytest.raises(OutboxError) as caught:
        Outbox(of_owner).enqueue(Message(b""))
    [command] = re.findall(r"as root: chown 0 (.*)", str(caught.value))
    subprocess.run(f"chown {OWNER + 1} {command}", shell=True, check=True)

    def run() -> None:
        become(OWNER + 1)
        with Outbox(of_owner) as outbox:
            outbox.enqueue(Message(b""))

    assert child(run) == 0


def test_without_root_a_copy_can_be_used(of_owner: Path, child: Callable[..., int]) -> None:
    def run() -> None:
        become(OWNER + 1)
        copy = of_owner.parent / "copy" / "p.db"
        copy.parent.mkdir()
        for file in (of_owner, Path(f"{of_owner}-wal")):
            with suppress(FileNotFoundError):
                shutil.copy(file, copy.parent)
        with Outbox(copy) as outbox:
            assert outbox.status().open == 1

    assert child(run) == 0


def test_root_of_a_container_cannot_give_a_file_to_every_group(
    tmp_path: Path, in_container: Callable[[str], None]
) -> None:
    """As in a volume with the set-group-ID bit whose group is not mapped into the container."""
    os.chown(tmp_path, -1, OWNER)
    tmp_path.chmod(0o2777)
    in_container(
        "from contextlib import closing\n"
        "from reliablepub import Outbox\n"
        "from reliablepub.outbox.sqlite.store import SqliteStore\n"
        f"path = '{tmp_path}/outbox.db'\n"
        "for n in range(1, 3):\n"
        "    with Outbox(path) as outbox:\n"
        "        outbox.enqueue(b'')\n"
        "    assert outbox.status().open == n\n"
        "    with closing(SqliteStore(path)) as store:\n"
        "        assert store.snapshot().counters.open == n\n"
    )


@pytest.fixture
def in_container() -> Callable[[str], None]:
    """Run Python as root of a user namespace that has no other users and groups."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to any group")
    unshare = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        miss("no user namespace can be made here, as in a chroot")

    def run(code: str) -> None:
        subprocess.run([*unshare, sys.executable, "-c", code], check=True, timeout=60)

    return run


def test_a_message_in_a_transaction_of_the_application_goes_into_no_planted_log(
    shared: Path, stranger: Plant, child: Callable[..., int]
) -> None:
    def victim() -> None:
        os.setuid(OWNER)
        os.umask(0o077)
        sql(shared, "PRAGMA journal_mode = WAL", "CREATE TABLE orders (id)")
        stranger(": > p.db-wal; : > p.db-shm")
        with closing(sqlite3.connect(shared)) as app:
            app.execute("INSERT INTO orders VALUES (1)")
            with pytest.raises(OutboxError, match=f"p.db-wal belongs to user {STRANGER}"):
                Outbox(shared).enqueue(Message(BODY), connection=app)

    assert child(victim) == 0
    assert int(stranger(f"grep -c -a '{BODY[:25].decode()}' p.db-wal")) == 0


def test_ballast_of_another_user_is_not_ours(shared: Path, stranger: Plant) -> None:
    stranger("head -c 8192 /dev/zero > p.db.ballast")
    assert not Ballast(shared, size=8192).release()


def test_of_a_status_file_no_more_is_read_than_one_can_have(path: Path, entry: Make) -> None:
    fill(path, entry)
    relay_lock = RelayLock(path)
    status = status_file_path(path)
    status.write_text(json.dumps({"pid": os.getpid(), "link": "up"}))
    status.chmod(0o600)
    assert relaying(path).status == {"pid": os.getpid(), "link": "up"}
    status.write_text(json.dumps({"pid": os.getpid(), "x": "x" * STATUS_BYTES_MAX}))
    assert not relaying(path).status
    with status.open("wb") as file:
        file.truncate(1 << 40)  # holes: read whole, this would be the end of the process
    assert not relaying(path).status
    status.write_bytes(b"[" * STATUS_BYTES_MAX)
    assert not relaying(path).status
    relay_lock.release()


def test_folders_that_others_can_write_to_are_warned_of_once(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = shared.parent
    me, my_group = os.geteuid(), os.getegid()
    cases = [
        (0o777, me, my_group, "every user can write to .* replace the outbox"),
        (0o1777, me, my_group, "every user can write to .* block the outbox"),
        (0o755, me, my_group, ""),
        (0o700, me, my_group, ""),
    ]
    if me == 0:
        cases += [
            (0o775, me, my_group, ""),  # the user's own group
            (0o775, me, STRANGER, f"members of group {STRANGER} can .* replace the outbox"),
            (0o1775, me, STRANGER, f"members of group {STRANGER} can .* block the outbox"),
            (0o755, STRANGER, my_group, f"user {STRANGER}, who owns it, can .* replace"),
        ]
    for number, (mode, owner, group, words) in enumerate(cases):
        folder = root / str(number)
        folder.mkdir()
        os.chown(folder, owner, group)
        folder.chmod(mode)
        caplog.clear()
        for _ in range(2):
            warn_of_folder(folder)
        assert len(caplog.records) == bool(words), (mode, owner, group)
        if words:
            assert re.search(words, caplog.text)


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_a_descriptor_that_another_thread_has_closed_meanwhile_is_passed_over(
    path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    closed = os.dup(0)
    os.close(closed)

    def files_with_a_closed_one() -> dict[tuple[int, int], list[int]]:
        files = open_files()
        found = path.with_name(path.name + suffix).stat()
        files[found.st_dev, found.st_ino].insert(0, closed)
        return files

    with Outbox(path) as first:
        first.enqueue(Message(b"a", routing_key="q"))
        monkeypatch.setattr(location, "open_files", files_with_a_closed_one)
        with Outbox(path) as second:
            second.enqueue(Message(b"b", routing_key="q"))
    assert Outbox(path).status().stored == 2


@pytest.mark.parametrize("index", [b"", bytes(32_768)])
def test_what_a_deleted_database_has_left_is_no_obstacle(path: Path, index: bytes) -> None:
    """An empty log and its index, beside the database that an application makes anew."""
    for suffix, content in (("-wal", b""), ("-shm", index)):
        left = path.with_name(path.name + suffix)
        left.write_bytes(content)
        left.chmod(0o600)
    with closing(sqlite3.connect(path)) as app:
        path.chmod(0o600)
        Outbox(path).create(connection=app)
        Outbox(path).enqueue(Message(b"1"), connection=app)
        app.commit()
        with closing(SqliteStore(path)) as store:
            Outbox(path).enqueue(Message(b"2"), connection=app)
            app.commit()
            found, _ = store.read_ready(1, 2, limit=9, bytes_max=10**6)
            assert [entry.message.body for entry in found] == [b"1", b"2"]
    assert Outbox(path).audit().is_right
