"""Go's amqp091 as a peer: builds go/main.go with Debian's packages, and runs it.

It knows Go's tool and the program's options. It must never know what is measured.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.speed.peers import BODY, WINDOW

PACKAGES = "golang-go golang-github-rabbitmq-amqp091-go-dev"
_DEBIAN_GO = Path("/usr/share/gocode")
_LIBRARY = _DEBIAN_GO / "src/github.com/rabbitmq/amqp091-go"


def missing() -> str | None:
    """What to do before Go can take part; None where it can."""
    if shutil.which("go") and _LIBRARY.exists():
        return None
    return f"Go's amqp091 does not take part: apt-get install {PACKAGES}"


class Gopher:
    """The program, built into a folder."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "publish"
        environment = os.environ | {"GO111MODULE": "off", "GOPATH": str(_DEBIAN_GO)}
        source = Path(__file__).with_name("go")
        command = ["go", "build", "-o", str(self._program), "."]
        subprocess.run(command, cwd=source, env=environment, check=True)

    def confirmed(self, url: str, queues: Sequence[str], count: int) -> None:
        """Deferred confirmations, a window's worth of them; persistent and mandatory."""
        self._publish(url, queues, count, WINDOW)

    def unconfirmed(self, url: str, queues: Sequence[str], count: int) -> None:
        """Without confirms: what was lost is never known."""
        self._publish(url, queues, count, 0)

    def _publish(self, url: str, queues: Sequence[str], count: int, window: int) -> None:
        options = [f"-url={url}", f"-count={count}", f"-window={window}", f"-size={len(BODY)}"]
        subprocess.run([self._program, *options, *queues], check=True)
