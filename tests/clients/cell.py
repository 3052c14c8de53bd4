"""One client plays one script, in a process of its own: it may hang, or take the process with it.

Run as `python -m tests.clients.cell CLIENT URL NUMBER`; it prints a line of JSON for each telling,
and ends with `HUNG` when none has come for `PATIENCE_S`. It must never know what the broker does.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time

from tests.clients.adapters import adapter
from tests.clients.letters import Letter, PublishAll
from tests.clients.scripts import SCRIPTS

PATIENCE_S = 6.0
"""More than twice what any script makes a client wait that is not stuck."""
HUNG = 3
SETTLE_S = 0.3
"""For what the client has written already to reach the broker."""


class Watch:
    """Ends the process when nothing is told any more; counted from when the client begins."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, letter: Letter, told: str) -> None:
        """Say it now; the process may end the next moment."""
        print(json.dumps([letter.name, told]), flush=True)
        self._last = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() < self._last + PATIENCE_S:
            time.sleep(0.1)
        os._exit(HUNG)


def main(client: str, url: str, number: str) -> None:
    """Play it, and leave at once: no library may hold the process."""
    logging.disable()
    publish_all: PublishAll = adapter(client).publish_all
    publish_all(url, SCRIPTS[int(number)].letters, Watch().tell)
    time.sleep(SETTLE_S)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
