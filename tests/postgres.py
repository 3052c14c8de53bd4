"""`PostgresServer`: a private PostgreSQL from Debian's package, to be killed and frozen by tests.

The package may also be that of another Debian, unpacked into a folder and entered by chroot.

This module knows processes, ports and the files of one server, and of a PgBouncer in front of it.
Everything it starts lives in one temporary folder, listens on loopback only, and ends with it: by
process id, and through the parent death signal even when the test run itself is killed. It must
never know reliablepub.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, LiteralString, Self

import psycopg
from psycopg import sql

from tests.rabbitmq import free_ports

StopMode = Literal["smart", "fast", "immediate"]

USER: Final = "postgres"
"""Superuser of the server, and the user that it runs as if the tests run as root."""

ROOT_VARIABLE: Final = "RELIABLEPUB_TEST_POSTGRES_ROOT"
"""The folder of another Debian whose PostgreSQL the tests shall use: make postgres-versions."""

_HERE: Final = Path("/")
ROOT: Final = Path(os.environ.get(ROOT_VARIABLE, _HERE)).absolute()
_VERSIONS: Final = Path("usr/lib/postgresql")
_PGBOUNCER: Final = Path("/usr/sbin/pgbouncer")
_SHARED_MEMORY: Final = Path("/dev/shm")
_SHARED_MEMORY_BYTES_MIN: Final = 2 * 1024**3
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_LOG_TAIL_BYTES: Final = 4000
_STOP_SIGNALS: Final[Mapping[StopMode, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}
_SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "max_prepared_transactions": "2",
    # Its files may be in memory.
    "shared_buffers": "32MB",
    "max_wal_size": "64MB",
}
_PGBOUNCER_CONFIG: Final = """\
[databases]
* = host=127.0.0.1 port={server_port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = 4
server_login_retry = 0.1
"""
# Both the shell and chroot become what they start. In there, the folder of the server has its own
# path, and devices are the host's, /dev/shm among them; the mounts end with the process.
_ENTER: Final = """\
mount -t tmpfs tmpfs "$0/tmp"
mount --rbind /dev "$0/dev"
mkdir -p "$0$1"
mount --bind "$1" "$0$1"
exec chroot "$0" env --chdir="$@"
"""
# The kernel closes the pipe of this shell when the test run is killed, which ends the freeze too.
_FREEZE: Final = """\
kill -STOP $1 || exit
until grep -q '^State:.T' /proc/$1/status; do :; done
children=$(cat /proc/$1/task/$1/children)
kill -STOP $children
echo frozen
read -r _
kill -CONT $children $1 2>/dev/null
"""


def is_installed() -> bool:
    """Whether Debian's postgresql package is here, in any version."""
    return next((ROOT / _VERSIONS).glob("*/bin/postgres"), None) is not None


def is_pgbouncer_installed() -> bool:
    """Whether Debian's pgbouncer package is here."""
    return _PGBOUNCER.exists()


class PostgresServer:
    """One PostgreSQL server with its own data and port; all gone on exit.

    The port and the data stay the same over `kill` or `stop` and `start`. There are no passwords:
    a client is who it says it is.

    Args:
        settings: As in postgresql.conf: ``{"fsync": "off"}``.
        parent: Where its folder is made. By default in memory, if there is enough: what was synced
            there outlives `kill` as on a disk, in a third of the time.
        copy_of: A server that runs, of which it begins as a physical copy.
        is_replica: Whether the copy follows that server, until it is promoted.
        is_started: Whether it is started on entry.
        root: The folder of the Debian whose PostgreSQL it shall be; another one needs root.
    """

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        parent: Path | None = None,
        copy_of: "PostgresServer | None" = None,
        is_replica: bool = False,
        is_started: bool = True,
        root: Path = ROOT,
    ) -> None:
        self._settings = _SETTINGS | dict(settings or {})
        self._parent = parent or _roomy_folder()
        self._copy_of = copy_of
        self._is_replica = is_replica
        self._is_started = is_started
        self._root = root
        self._numbers = itertools.count(1)
        self._exit = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._freezer: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(
                _private_folder("postgres-", self._parent, self._root)
            )
            (self.port,) = free_ports(1)
            self._create_data()
            stack.callback(self._end)
            if self._is_started:
                self.start()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def start(self) -> None:
        """Start, and wait until the server lets clients in: it has recovered from a kill.

        Call it from a thread that lives as long as the server: the kernel ends a server whose
        starter is gone.
        """
        assert not self.is_running, "the server is running"
        command = (_program("postgres", self._root), "-D", self.data, "-p", str(self.port))
        self._process = _start(self._folder, *command, root=self._root)
        self._wait_until_ready()

    def stop(self, mode: StopMode = "fast", *, wait: bool = True) -> None:
        """Shut down as `pg_ctl stop` would.

        Args:
            mode: ``smart`` waits until the clients are gone, ``fast`` sends them away,
                ``immediate`` ends without a checkpoint.
            wait: Whether to wait until it is down.
        """
        assert self._process is not None, "the server was never started"
        self._process.send_signal(_STOP_SIGNALS[mode])
        if wait:
            self._process.wait(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL to each of its processes. Does nothing to a server that is down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        while pids := self.processes():  # as long as one is left, the server cannot be started
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        self.resume()

    def recover(self) -> None:
        """Whatever a test did: running, and not frozen."""
        self.resume()
        if self.is_running and not can_connect(self.url_of()):  # it is being stopped
            self.kill()
        if not self.is_running:
            self.start()

    def promote(self) -> None:
        """End the recovery of a replica: it accepts writes when this returns."""
        self.execute("SELECT pg_promote()")

    def recover_until(self, point: str, origin: "PostgresServer") -> None:
        """Start a copy that was made earlier, and recover up to a restore point of its origin."""
        origin.execute("SELECT pg_switch_wal()")
        archive = self._folder / "archive"
        shutil.copytree(origin.data / "pg_wal", archive)
        if os.geteuid() == 0:
            for path in (archive, *archive.rglob("*")):
                shutil.chown(path, *_user(self._root))
        with (self.data / "postgresql.conf").open("a") as config:
            config.write(f"restore_command = 'cp {archive}/%f %p'\n")
            config.write(f"recovery_target_name = '{point}'\n")
            config.write("recovery_target_action = promote\n")
        (self.data / "recovery.signal").touch()
        self.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self.execute("SELECT pg_is_in_recovery()") == [(True,)]:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def run(self, program: str, *arguments: str, stdin: bytes = b"") -> bytes:
        """Run a program of PostgreSQL's in the folder of this server; its output.

        Args:
            program: Such as ``pg_dump``; its user is that of the server.
            arguments: Of the program.
            stdin: Its input.
        """
        path = _program(program, self._root)
        command = _command(self._folder, path, *arguments, root=self._root)
        with (self._folder / "log").open("ab") as log:
            ended = subprocess.run(
                command,
                check=False,
                **_surroundings(self._folder),
                input=stdin,
                stdout=-1,
                stderr=log,
            )
        assert ended.returncode == 0, self.log
        written: bytes = ended.stdout
        return written

    # ------------------------------------------------------------------ looking

    def url_of(self, database: str = USER, *, user: str = USER, port: int | None = None) -> str:
        """`postgresql://postgres@127.0.0.1:PORT/DATABASE`; another port is that of a proxy."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    @property
    def folder(self) -> Path:
        """Where everything of the server lives."""
        return self._folder

    @property
    def data(self) -> Path:
        """The data directory, in which all its processes work."""
        return self._folder / "data"

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the postmaster lives; a frozen one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of the server's log."""
        data = (self._folder / "log").read_bytes()
        return data[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def processes(self) -> list[int]:
        """The process ids of the postmaster and its children, one of which is there per client."""
        found = []
        for link in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                if link.samefile(self.data):
                    found.append(int(link.parent.name))
        return found

    # ------------------------------------------------------------------ databases

    def create_database(self, template: str = "template1") -> str:
        """Make a database that no other test has; return its name."""
        name = f"test_{next(self._numbers)}"
        self.execute("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy", name, template)
        return name

    def drop_database(self, name: str) -> None:
        """Delete a database, and end its connections. Does nothing if it is gone."""
        self.execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", name)

    def execute(self, statement: LiteralString, *names: str) -> list[tuple[Any, ...]]:
        """Return the rows of a superuser's statement; names are put into its braces."""
        with contextlib.closing(psycopg.connect(self.url_of(), autocommit=True)) as connection:
            composed = sql.SQL(statement).format(*map(sql.Identifier, names))
            cursor = connection.execute(composed)
            return cursor.fetchall() if cursor.description else []

    # ------------------------------------------------------------------ misbehaving

    def pause(self) -> None:
        """SIGSTOP to each of its processes: the peer is there, and silent."""
        if self._freezer is not None:
            return
        self._freezer = subprocess.Popen(
            ["/bin/sh", "-c", _FREEZE, "freezer", str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for pytest
        )
        assert self._freezer.stdout is not None
        assert self._freezer.stdout.readline() == b"frozen\n"

    def resume(self) -> None:
        """SIGCONT to each of its processes."""
        if self._freezer is not None:
            self._freezer.communicate()
            self._freezer = None

    # ------------------------------------------------------------------ inside

    def _create_data(self) -> None:
        if (origin := self._copy_of) is not None:
            options = ["--checkpoint=fast", "--no-sync", *(["-R"] if self._is_replica else [])]
            self.run("pg_basebackup", f"--dbname={origin.url_of()}", f"-D{self.data}", *options)
        else:
            options = ["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8"]
            options += [f"--username={USER}", "--wal-segsize=1"]
            self.run("initdb", f"-D{self.data}", *options)
        settings = self._settings | {"unix_socket_directories": str(self._folder)}
        with (self.data / "postgresql.conf").open("a") as config:
            config.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not can_connect(self.url_of()):
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not start; the end of its log:\n{self.log}")
            time.sleep(0.01)

    def _end(self) -> None:
        self.resume()
        if self.is_running:  # without a checkpoint, since the data goes too
            self.stop("immediate")


@contextlib.contextmanager
def pgbouncer(server: PostgresServer, *, pool_mode: str = "transaction") -> Iterator[int]:
    """Run a PgBouncer in front of a server; its port."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_private_folder("pgbouncer-", server.folder.parent, _HERE))
        (port,) = free_ports(1)
        config = folder / "pgbouncer.ini"
        config.write_text(
            _PGBOUNCER_CONFIG.format(
                server_port=server.port, port=port, user=USER, pool_mode=pool_mode
            )
        )
        process = _start(folder, _PGBOUNCER, config, root=_HERE)
        stack.callback(process.wait)
        stack.callback(process.kill)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not can_connect(server.url_of(port=port)):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.01)
        yield port


def can_connect(url: str) -> bool:
    """Whether a server there lets a client in."""
    try:
        psycopg.connect(url, connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


def programs() -> str:
    """The folder of the programs, as its path is inside the root."""
    return str(_program("postgres").parent)


def _program(name: str, root: Path = ROOT) -> Path:
    """A program of the newest version that is installed, as its path is inside the root."""
    found = (root / _VERSIONS).glob(f"*/bin/{name}")
    newest = max(found, key=lambda path: int(path.parent.parent.name))
    return _HERE / newest.relative_to(root)


def _roomy_folder() -> Path | None:
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        found = os.statvfs(_SHARED_MEMORY)
        if found.f_bavail * found.f_frsize >= _SHARED_MEMORY_BYTES_MIN:
            return _SHARED_MEMORY
    return None


@contextlib.contextmanager
def _private_folder(prefix: str, parent: Path | None, root: Path = ROOT) -> Iterator[Path]:
    """A temporary folder of the user that the servers run as: none of them runs as root."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        if os.geteuid() == 0:
            shutil.chown(name, *_user(root))
        yield Path(name)


def _user(root: Path = ROOT) -> tuple[int, int]:
    """The number of the servers' user, and that of its group; of each Debian its own."""
    for line in (root / "etc/passwd").read_text().splitlines():
        name, _, user, group, *_ = line.split(":")
        if name == USER:
            return int(user), int(group)
    raise LookupError(f"no user {USER} in {root}")


def _command(folder: Path, *command: str | Path, root: Path = ROOT) -> list[str | Path]:
    """A command that becomes the servers' user, and ends with this process."""
    user, group = _user(root)
    become = [f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    # SIGQUIT is an immediate shutdown of PostgreSQL: nothing stays behind in the kernel.
    setpriv = ["setpriv", "--pdeathsig=QUIT", *(become if os.geteuid() == 0 else [])]
    enter: list[str | Path] = ["unshare", "--mount", "bash", "-euc", _ENTER, root, folder]
    return [*([] if root == _HERE else enter), *setpriv, *command]


def _surroundings(folder: Path) -> dict[str, Any]:
    return {
        "env": {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"},
        "cwd": folder,
        "start_new_session": True,  # Ctrl-C is for pytest
    }


def _start(folder: Path, *command: str | Path, root: Path = ROOT) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one; it logs to a file in the folder."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            _command(folder, *command, root=root),
            **_surroundings(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
