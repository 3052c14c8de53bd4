"""Mutants that mypy refuses: it is one of the tests that every change must pass, and the quickest.

mypy reads all copies of a function at once, in one file. What it says of the copy that is as
written, or of copies as such, says nothing of a mutant.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from mutmut.configuration import config
from mutmut.mutation.file_mutation import FailedTypeCheckMutant, MutatedMethodLocation
from mutmut.type_checking import TypeCheckingError
from mutmut.utils.file_utils import change_cwd
from mutmut.utils.format_utils import get_mutant_name, is_mutated_method_name

COMMAND = (sys.executable, "-m", "mypy", "--output=json", "--no-warn-unused-ignores")
TELLING = {
    *("arg-type", "assignment", "attr-defined", "call-arg", "call-overload", "comparison-overlap"),
    *("index", "operator", "return-value", "union-attr"),
}
"""Kinds of errors that a mutant can have and a copy cannot."""


def refused(room: str) -> dict[str, FailedTypeCheckMutant]:
    """By name, the mutants below a directory that mypy does not accept."""
    with change_cwd("mutants"):
        done = subprocess.run([*COMMAND, room], capture_output=True, text=True, check=False)
        errors: dict[Path, list[dict[str, str | int]]] = defaultdict(list)
        for line in done.stdout.splitlines():
            error = json.loads(line)
            if error["code"] in TELLING:
                errors[Path(error["file"])].append(error)
        return {
            failed.name: failed
            for path, found in errors.items()
            for failed in _refused_in(path, found)
        }


def _refused_in(path: Path, errors: list[dict[str, str | int]]) -> Iterator[FailedTypeCheckMutant]:
    said: dict[str, set[tuple[str | int, str | int]]] = defaultdict(set)
    places = _copies(path)
    for place in places:
        for error in errors:
            if place.line_number_start <= int(error["line"]) <= place.line_number_end:
                said[place.function_name].add((error["code"], error["message"]))
    for place in places:
        name, _, number = place.function_name.partition("__mutmut_")
        news = said[place.function_name] - said[f"{name}__mutmut_orig"]
        if name.endswith("__init__"):  # the type of an attribute is what is first assigned to it
            news = {(code, message) for code, message in news if code != "assignment"}
        if news and number != "orig":
            text = str(min(news)[1])
            error_there = TypeCheckingError(path, place.line_number_start, text)
            yield FailedTypeCheckMutant(
                place, get_mutant_name(path, place.function_name), error_there
            )


def _copies(path: Path) -> list[MutatedMethodLocation]:
    """Where each copy of a function is."""
    return [
        MutatedMethodLocation(path, node.name, node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and is_mutated_method_name(node.name)
    ]


@contextmanager
def with_mypy(room: str) -> Iterator[None]:
    """Have mutmut leave out what mypy refuses."""
    config().type_check_command = ["mypy"]
    with patch("mutmut.__main__.filter_mutants_with_type_checker", lambda: refused(room)):
        yield
