"""What the interpreter does, counted: the same on every machine, however busy.

It knows Python's two hooks for that. It must never know what runs.
"""

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
