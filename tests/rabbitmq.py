"""`RabbitMQNode`: a private RabbitMQ from Debian's package, to be killed and frozen by tests.

The package may also be that of another Debian, unpacked into a folder and entered by chroot.

This module knows processes, ports and the files of one node. Everything it starts lives in one
temporary folder, listens on loopback only, and ends with it: by process id, and through the parent
death signal even when the test run itself is killed. It must never know reliablepub.
"""

import contextlib
import errno
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

import pika
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.exceptions import AMQPError
from tenacity import retry, retry_if_result, stop_after_attempt, wait_fixed

from tests.waiting import until

# Not /usr/sbin/rabbitmq-server: that wrapper changes the user and keeps a shell in between.
_BIN = Path("/usr/lib/rabbitmq/bin")
_HERE = Path("/")
ROOT_VARIABLE = "RELIABLEPUB_TEST_RABBITMQ_ROOT"
ROOT = Path(os.environ.get(ROOT_VARIABLE, _HERE))
"""The folder of another Debian whose RabbitMQ the tests shall use: make rabbitmq-versions."""
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_CTL_TIMEOUT_S = 30.0
_LOG_TAIL_BYTES = 4000

_CONFIG = """\
listeners.tcp.1 = {address}:{amqp_port}
loopback_users = none
max_message_size = {max_message_size}
# Only an alarm that a test sets may block a publisher.
vm_memory_high_watermark.absolute = 2GB
disk_free_limit.absolute = 1MB
"""
_TLS_CONFIG = """\
listeners.ssl.1 = 127.0.0.1:{amqps_port}
ssl_options.cacertfile = {authority}
ssl_options.certfile = {file}
ssl_options.keyfile = {file}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
"""
# Read by a node that has no data yet: it starts as a member of the cluster.
_PEER_CONFIG = """\
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = {peer}
"""
# What a command of rabbitmqctl calls, and who it says it is.
_USERS = "rabbit_auth_backend_internal"
_ACTOR = '<<"tests">>'
_VALUE = "value "
_TOLD = """\
io:format("~ts", [try io_lib:format("value ~tp", [begin
{expression}
end]) catch Class_:Reason_ -> io_lib:format("~tp", [{{Class_, Reason_}}]) end]).
"""
_ADVANCED_CONFIG = "[{rabbit, [{msg_store_file_size_limit, 1048576}]}].\n"


def is_installed(root: Path = _HERE) -> bool:
    """Whether Debian's rabbitmq-server package is here, or in the Debian unpacked in a folder."""
    return _in(root, _BIN / "rabbitmq-server").exists()


@dataclass(frozen=True)
class Site:
    """Where a node lives.

    Attributes:
        host: the name by which the nodes of a cluster find it.
        address: where it listens, and nowhere else.
        network: the file of its network namespace; empty for the one of this process.
    """

    host: str = "localhost"
    address: str = "127.0.0.1"
    network: str = ""


_LOOPBACK = Site()


class NotStarted(Exception):
    """A node that does not complete an AMQP handshake in time."""


class RabbitMQNode:
    """One RabbitMQ node with its own epmd, cookie, data and ports; all gone on exit.

    The ports and the data stay the same over `kill` or `stop` and `start`.

    Args:
        max_message_size: What the broker accepts, in bytes; more closes the channel with 406.
        root: The folder of another Debian, whose RabbitMQ it shall be; needs to be root.
        tls: A file with a certificate and its key, to speak AMQPS too. Clients must have one as
            well, signed by the ``ca.crt`` beside it.
        beside: A running node to make a cluster with; it must outlive this one.
        plugins: Names of plugins to enable; a start takes longer then.
        config: Further lines of ``rabbitmq.conf``; ``{folder}`` is the node's, as the node sees it.
        files: Files for that folder by name, which these lines may name.
        site: Another place than this host's loopback.
        tick_s: Seconds of silence after which nodes of a cluster give each other up.
    """

    def __init__(
        self,
        *,
        max_message_size: int = 1024 * 1024,
        root: Path = _HERE,
        tls: Path | None = None,
        beside: "RabbitMQNode | None" = None,
        plugins: tuple[str, ...] = (),
        config: str = "",
        files: Mapping[str, bytes] = MappingProxyType({}),
        site: Site = _LOOPBACK,
        tick_s: int = 60,
    ) -> None:
        self._plugins = plugins
        self._config = config
        self._files = files
        self._site = site
        self._tick_s = tick_s
        self._tls = tls
        self._max_message_size = max_message_size
        self._root = root
        self._beside = beside
        self._exit = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_alarmed = False

    # ------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            parent = None if self._root == _HERE else self._root / "tmp"
            folder = tempfile.TemporaryDirectory(prefix="rabbitmq-", dir=parent)
            self._folder = Path(stack.enter_context(folder))
            self.amqp_port, self._dist_port, self._epmd_port, self._amqps_port = free_ports(4)
            self._cookie = os.urandom(16).hex()
            if self._beside is not None:
                self._epmd_port, self._cookie = self._beside._epmd_port, self._beside._cookie
            self._env = self._environment()
            self._write_files()
            if self._beside is None or self._site.network:
                stack.enter_context(self._epmd())
            stack.callback(self.kill)
            self.start()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def start(self) -> None:
        """`launch`, and `wait_until_ready`."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the process.

        Call it from a thread that lives as long as the node: the kernel ends a node whose starter
        is gone.
        """
        assert not self.is_running, "the node is running"
        self._is_alarmed = False
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command("setpriv", "--pdeathsig=KILL", _BIN / "rabbitmq-server"),
                env=self._env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def stop(self) -> None:
        """Shut down in order, as `rabbitmqctl stop` would."""
        assert self._process is not None, "the node was never started"
        self._process.terminate()
        self._process.wait(_STOP_TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL: what is not on disk is lost. Does nothing to a node that is down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def erase(self) -> None:
        """Delete the data of a node that is down: the next start is the first one of a new node."""
        assert not self.is_running, "the node is running"
        shutil.rmtree(self._folder / "data")

    def recover(self) -> None:
        """Whatever a test did: running, not frozen, no alarm."""
        if not self.is_running:
            self.start()
        self.resume()
        if self._is_alarmed:
            self.clear_memory_alarm()

    # ------------------------------------------------------------------ looking

    @property
    def url(self) -> str:
        """`amqp://guest:guest@127.0.0.1:PORT/%2F`, with the address of its site."""
        return f"amqp://guest:guest@{self._site.address}:{self.amqp_port}/%2F"

    @property
    def amqps_url(self) -> str:
        """The same, by TLS, for a node that has a certificate."""
        return f"amqps://guest:guest@127.0.0.1:{self._amqps_port}/%2F"

    @property
    def name(self) -> str:
        """The Erlang node name."""
        return f"reliablepub-{self.amqp_port}@{self._site.host}"

    @property
    def root(self) -> Path:
        """The folder of the Debian whose RabbitMQ it is."""
        return self._root

    @property
    def pid(self) -> int:
        """The process id of the Erlang virtual machine itself."""
        assert self._process is not None, "the node was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives; a frozen one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def folder(self) -> Path:
        """Where everything of the node lives; the HOME of all its processes."""
        return self._folder

    @property
    def log(self) -> str:
        """The end of the node's log."""
        data = self._log_path.read_bytes()
        return data[-_LOG_TAIL_BYTES:].decode(errors="replace")

    @functools.cached_property
    def version(self) -> tuple[int, ...]:
        """`(3, 10, 8)`."""
        version = self.eval("{ok, Version} = application:get_key(rabbit, vsn), Version.")
        return tuple(int(part) for part in version.strip('"').split("."))

    # ------------------------------------------------------------------ misbehaving

    def pause(self) -> None:
        """SIGSTOP: the peer is there, and silent.

        On a busy machine, its other threads run until the one that gets the signal does.
        """
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _states(self.pid) <= {"T"}, what="the stop of RabbitMQ")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close_all_connections(self, reason: str) -> None:
        """connection.close 320 to every client."""
        self._do(
            "rabbit_connection_tracking_handler:close_connections("
            "rabbit_connection_tracking:list_on_node(node()), "
            f"{_binary(reason)}, 0)"
        )

    def set_memory_alarm(self) -> None:
        """Have every connection that publishes blocked, until the alarm is cleared."""
        self._is_alarmed = True
        alarm = "{{resource_limit, memory, node()}, []}"
        # To set it returns at once; to ask behind that waits until each connection has been told.
        self.eval(f"rabbit_alarm:set_alarm({alarm}), rabbit_alarm:get_alarms().")

    def clear_memory_alarm(self) -> None:
        """connection.unblocked."""
        self._is_alarmed = False
        self.eval("rabbit_alarm:clear_alarm({resource_limit, memory, node()}).")

    # ------------------------------------------------------------------ users

    def add_user(self, name: str, password: str) -> None:
        """A user without permissions; one of that name is replaced."""
        self._do(
            f"case {_USERS}:exists({_binary(name)}) of "
            f"true -> {_USERS}:delete_user({_binary(name)}, {_ACTOR}); false -> ok end"
        )
        self._do(f"{_USERS}:add_user({_binary(name)}, {_binary(password)}, {_ACTOR})")

    def delete_user(self, name: str) -> None:
        """Forget a user."""
        self._do(f"{_USERS}:delete_user({_binary(name)}, {_ACTOR})")

    def change_password(self, name: str, password: str) -> None:
        """Give a user another password; connections stay."""
        self._do(f"{_USERS}:change_password({_binary(name)}, {_binary(password)}, {_ACTOR})")

    def set_permissions(
        self, name: str, *, configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """What a user may do in the virtual host /; a channel goes on with what it knows."""
        rights = ", ".join(map(_binary, (name, "/", configure, write, read)))
        self._do(f"{_USERS}:set_permissions({rights}, {_ACTOR})")

    def set_topic_permissions(self, name: str, exchange: str, *, write: str) -> None:
        """Which routing keys a user may publish with, to one exchange of the virtual host /."""
        rights = ", ".join(map(_binary, (name, "/", exchange, write, ".*")))
        self._do(f"{_USERS}:set_topic_permissions({rights}, {_ACTOR})")

    def set_channel_max(self, name: str, count: int) -> None:
        """Limit the open channels of a user."""
        limits = _binary(json.dumps({"max-channels": count}))
        self._do(f"{_USERS}:set_user_limits({_binary(name)}, {limits}, {_ACTOR})")

    # ------------------------------------------------------------------ commands

    def _do(self, call: str) -> None:
        """Call what a command of rabbitmqctl calls."""
        done = self.eval(f"{call}.")
        if done != "ok":
            raise RuntimeError(f"{call}: {done}")

    def eval(self, expression: str) -> str:
        """The value of an Erlang expression inside the node; it ends with a full stop.

        This takes 3 ms of processor time, a call of rabbitmqctl 0.9 s: it starts an Erlang itself.

        Raises:
            RuntimeError: It failed; the message has the reason.
        """
        done = self._called(expression)
        value = done.stdout.removeprefix(_VALUE)
        if done.returncode != 0 or value == done.stdout:
            raise RuntimeError(f"{expression}: {done.stderr or done.stdout}")
        return value

    # A machine that is busy may refuse the call before anything ran.
    @retry(
        retry=retry_if_result(lambda done: "failed to connect" in done.stderr),
        stop=stop_after_attempt(3),
        wait=wait_fixed(0.5),
        retry_error_callback=lambda state: state.outcome.result(),  # type: ignore[union-attr]
    )
    def _called(self, expression: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(
                "erl_call",
                "-n",
                self.name,
                "-c",
                self._cookie,
                "-r",  # a name that no earlier call has: the node might not have forgotten it yet
                "-fetch_stdout",
                "-no_result_term",
                "-e",
            ),
            env=self._env,
            input=_TOLD.format(expression=expression.strip().removesuffix(".")),
            capture_output=True,
            text=True,
            timeout=_CTL_TIMEOUT_S,
            check=False,
        )

    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl ARGUMENTS` prints.

        Raises:
            RuntimeError: It failed; the message has its output.
        """
        done = subprocess.run(
            self._command(_BIN / "rabbitmqctl", "--quiet", *arguments),
            env=self._env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CTL_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {arguments[0]} failed: {done.stderr or done.stdout}")
        return done.stdout.strip()

    # ------------------------------------------------------------------ inside

    @property
    def _inner_folder(self) -> str:
        """The folder as the node sees it."""
        return str(_HERE / self._folder.relative_to(self._root))

    @property
    def _log_path(self) -> Path:
        return self._folder / "log"

    def _command(self, *command: str | Path) -> list[str | Path]:
        """A command as it is run inside the root; both it and `chroot` become what they start."""
        if self._root != _HERE:
            # Erlang looks into /proc, which is mounted for this command alone.
            command = ("unshare", "--mount-proc", f"--root={self._root}", *command)
        if self._site.network:  # whose file is outside of the root
            command = ("nsenter", f"--net={self._site.network}", *command)
        return list(command)

    def _environment(self) -> dict[str, str]:
        """Nothing inherited but PATH: a node of this machine's own must not shine through."""
        loopback = f"-kernel inet_dist_use_interface {{{self._site.address.replace('.', ',')}}}"
        tick = f"-kernel net_ticktime {self._tick_s}"
        folder = self._inner_folder
        return {
            "PATH": os.environ["PATH"],
            "HOME": folder,  # the cookie's place
            "LANG": "C.UTF-8",
            "ERL_CRASH_DUMP": "/dev/null",
            "ERL_EPMD_ADDRESS": self._site.address,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_CTL_ERL_ARGS": loopback,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_GENERATED_CONFIG_DIR": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_PLUGINS_DIR": f"{folder}/plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"-start_epmd false {loopback} {tick}",
            # The script then becomes the virtual machine, so its pid is the one we know.
            "RABBITMQ_ALLOW_INPUT": "true",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }

    def _write_files(self) -> None:
        config = _CONFIG.format(
            address=self._site.address,
            amqp_port=self.amqp_port,
            max_message_size=self._max_message_size,
        )
        if self._beside is not None:
            config += _PEER_CONFIG.format(peer=self._beside.name)
        if self._tls is not None:
            config += _TLS_CONFIG.format(
                amqps_port=self._amqps_port, authority=self._tls.with_name("ca.crt"), file=self._tls
            )
        config += self._config.replace("{folder}", self._inner_folder)
        (self._folder / "rabbitmq.conf").write_text(config)
        for name, data in self._files.items():
            (self._folder / name).write_bytes(data)
        (self._folder / "advanced.config").write_text(_ADVANCED_CONFIG)
        (self._folder / "enabled_plugins").write_text(f"[{','.join(self._plugins)}].\n")
        cookie = self._folder / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        # A start spends a third of its time looking into seventy plugins that are not enabled. Only
        # the schema of rabbitmq.conf is needed from there.
        installed = _in(self._root, _BIN / "rabbitmq-server").resolve().parent.parent / "plugins"
        plugins = self._folder / "plugins"
        plugins.mkdir()
        for core in installed.glob("*-[0-9]*" if self._plugins else "rabbit-[0-9]*"):
            (plugins / core.name).symlink_to(_HERE / core.relative_to(self._root))

    @contextlib.contextmanager
    def _epmd(self) -> Iterator[None]:
        """Erlang's port mapper: our own child, where Erlang would leave a daemon behind."""
        port = str(self._epmd_port)
        epmd = subprocess.Popen(
            self._command(
                "setpriv", "--pdeathsig=KILL", "epmd", "-port", port, "-address", self._site.address
            ),
            env=self._env,
            start_new_session=True,
        )
        try:
            yield
        finally:
            epmd.kill()
            epmd.wait()

    def wait_until_ready(self) -> None:
        """Wait until the node completes an AMQP handshake.

        Raises:
            NotStarted: it does not in time; it was killed.
        """
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not can_handshake(self.url):
            if not self.is_running or time.monotonic() > deadline:
                self.kill()
                raise NotStarted(f"RabbitMQ did not start; the end of its log:\n{self.log}")
            time.sleep(0.02)


def can_handshake(url: str) -> bool:
    """Whether a broker there completes an AMQP handshake."""
    parameters = pika.URLParameters(url)
    try:  # without pika first: it logs an error for every port that is not open yet
        socket.create_connection((parameters.host, parameters.port), timeout=5).close()
        pika.BlockingConnection(parameters).close()
    except (OSError, AMQPError, AMQPConnectorException):
        return False
    return True


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as in proc(5)."""
    states = set()
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # that thread has ended
            states.add(file.read_text().rpartition(")")[2].split()[0])
    return states


def _binary(text: str) -> str:
    """A text as Erlang is told it."""
    return f"<<{json.dumps(text)}>>"


def _in(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def free_ports(count: int) -> list[int]:
    """Free loopback ports below the ephemeral range, and apart from those of fake brokers.

    From that range, the kernel could give the port of a killed node to a client that is just trying
    to reconnect to it, and the client would be connected to itself.
    """
    ports: list[int] = []
    candidates = random.SystemRandom().sample(range(10000, 20000), k=200)
    while len(ports) < count:
        port = candidates.pop()
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0reliablepub test {port}")  # a server may bind its port seconds later
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            # It ends with this process. Its number is beyond those that tests use up.
            fcntl.fcntl(name, fcntl.F_DUPFD_CLOEXEC, 500)
            name.close()
            ports.append(port)
    return ports
