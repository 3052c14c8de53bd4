"""Entry point of `reliablepub` and of `python -m reliablepub`: the command line.

Knows: when SIGINT may raise KeyboardInterrupt. Must never know: what the command line does.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line, and exit with its code.

    SIGINT is held back until a command runs, and after it. While modules are imported, or Python
    ends, KeyboardInterrupt would be a traceback, or turn into another error and exit code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    from reliablepub.cli import main as command_line  # noqa: PLC0415
    from reliablepub.cli.commands import Exit  # noqa: PLC0415

    try:
        command_line()
    except KeyboardInterrupt:  # a second one, while the first was reported
        sys.exit(Exit.OPEN)
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # Once KeyboardInterrupt has left code that was run from a text, as `dataclass` runs it in
        # an import, Python ends as if killed by SIGINT, although that was handled. Another text
        # resets this.
        exec("")  # noqa: S102


if __name__ == "__main__":
    main()
