"""What interpreters do, counted: the same on every machine, however busy.

It knows the hooks of Python and of SQLite for that. It must never know what runs.
"""

import sqlite3
import sys
from types import FrameType
from typing import Any, Self


class Calls:
    """Counts function calls on this thread, Python's and C's, while it is open."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._noted)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _noted(self, _frame: FrameType, event: str, _argument: Any) -> None:
        if event in {"call", "c_call"}:
            self.count += 1


class Instructions:
    """Counts the bytecode instructions of functions that are called while it is open.

    What C does inside of one of them is not seen.
    """

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        self._before = sys.gettrace()  # coverage's, perhaps
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one such frame beforehand
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._stepped

    def _stepped(self, _frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "opcode":
            self.count += 1
        return self._stepped


class Steps:
    """Counts the instructions of SQLite's virtual machine on one connection, to the nearest ten."""

    _AT_A_TIME = 10

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.count = 0
        self._connection = connection

    def __enter__(self) -> Self:
        self._connection.set_progress_handler(self._stepped, self._AT_A_TIME)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.set_progress_handler(None, 0)

    def _stepped(self) -> int:
        self.count += self._AT_A_TIME
        return 0  # go on
