"""What is written in Go: amqp091 as a peer, and a broker that keeps nothing.

It builds the programs of go/ with Debian's packages, and runs them. It knows Go's tool and the
programs' options. It must never know what is measured.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tests.speed.peers import BODY, NARROW, WINDOW

PACKAGES = "golang-go golang-github-rabbitmq-amqp091-go-dev"
_DEBIAN_GO = Path("/usr/share/gocode")
_LIBRARY = _DEBIAN_GO / "src/github.com/rabbitmq/amqp091-go"
_PROGRAMS = Path(__file__).with_name("go")
_ROOT = Path(__file__).parent.parent.parent
_NEWEST = Path(os.environ.get("GO_CACHE", _ROOT / ".go-newest"))


def missing() -> str | None:
    """What to do before Go can take part; None where it can."""
    if shutil.which("go") and _LIBRARY.exists():
        return None
    return f"Go does not take part: apt-get install {PACKAGES}"


def versions() -> str:
    """The versions of amqp091-go that take part, for the head of a table."""
    found = []
    if missing() is None:
        package = PACKAGES.rsplit(maxsplit=1)[-1]
        asked = ["dpkg-query", "--show", "--showformat=${Version}", package]
        found.append(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    if (_NEWEST / "version").exists():
        found.append((_NEWEST / "version").read_text())
    return f"amqp091-go {' and '.join(found)}" if found else ""


def _built(name: str, folder: Path) -> Path:
    environment = os.environ | {"GO111MODULE": "off", "GOPATH": str(_DEBIAN_GO)}
    command = ["go", "build", "-o", str(folder / name), "."]
    subprocess.run(command, cwd=_PROGRAMS / name, env=environment, check=True)
    return folder / name


class Gopher:
    """A program with Go's amqp091."""

    def __init__(self, program: Path) -> None:
        self._program = program

    @classmethod
    def of_debian(cls, folder: Path) -> Self:
        """That of Debian's package, built into a directory."""
        return cls(_built("publish", folder))

    @classmethod
    def newest(cls) -> Self | None:
        """That of ``make go-newest``, if it was made."""
        return cls(_NEWEST / "publish") if (_NEWEST / "version").exists() else None

    def confirmed(self, url: str, queues: Sequence[str], count: int) -> None:
        """Deferred confirmations, a window's worth of them; persistent and mandatory."""
        self._publish(url, queues, count, WINDOW)

    def confirmed_in_narrow(self, url: str, queues: Sequence[str], count: int) -> None:
        """The same in a window that many programs have."""
        self._publish(url, queues, count, NARROW)

    def confirmed_with_ids(self, url: str, queues: Sequence[str], count: int) -> None:
        """The same, each message with an id and a header, as ours have them."""
        self._publish(url, queues, count, WINDOW, "-ids")

    def unconfirmed(self, url: str, queues: Sequence[str], count: int) -> None:
        """Without confirms: what was lost is never known."""
        self._publish(url, queues, count, 0)

    def _publish(
        self, url: str, queues: Sequence[str], count: int, window: int, *more: str
    ) -> None:
        options = [f"-url={url}", f"-count={count}", f"-window={window}", f"-size={len(BODY)}"]
        subprocess.run([self._program, *options, *more, *queues], check=True)


class Sink:
    """A broker that confirms what it has read, and keeps nothing.

    Attributes:
        url: its address.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        self.url = f"amqp://guest:guest@127.0.0.1:{int(process.stdout.readline())}/%2F"
        self._pid = process.pid

    def processor_s(self) -> float:
        """Seconds of CPU time so far (proc(5), stat)."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def sink(folder: Path) -> Iterator[Sink]:
    """One for the block, built into a directory."""
    with subprocess.Popen([_built("sink", folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Sink(process)
        finally:
            process.kill()
