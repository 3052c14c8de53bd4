"""Each explained survivor is a mutant of code that is still there; `make mutants` takes hours."""

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SURVIVORS = tomllib.loads((FOLDER / "survivors.toml").read_text())["survivor"]


def source_of(function: str) -> str:
    """The source of a function by its dotted name; empty if it is not there."""
    names = function.split(".")
    lengths = (n for n in range(len(names), 0, -1) if file_of(names[:n]).is_file())
    length = next(lengths, 0)
    if not length:
        return ""
    text = file_of(names[:length]).read_text()
    node: ast.AST = ast.parse(text)
    for name in names[length:]:
        within = (one for one in ast.iter_child_nodes(node) if getattr(one, "name", "") == name)
        found = next(within, None)
        if found is None:
            return ""
        node = found
    return ast.get_source_segment(text, node) or ""


def file_of(names: list[str]) -> Path:
    return ROOT.joinpath(*names).with_suffix(".py")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("survivor", SURVIVORS, ids=lambda survivor: survivor["function"])
def test_what_was_mutated_is_still_there(survivor: dict[str, Any]) -> None:
    assert in_one_line(survivor["was"]) in in_one_line(source_of(survivor["function"]))
    assert survivor["was"] != survivor["now"]


def test_no_survivor_is_explained_twice() -> None:
    names = [(one["function"], one["was"], one["now"]) for one in SURVIVORS]
    assert len(names) == len(set(names))
