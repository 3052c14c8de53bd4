"""The rules of the house as tests: who imports whom, how big things get, what is shipped.

What a linter can check is ruff's and mypy's affair: docstrings, names, types.
"""

import ast
import fnmatch
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import reliablepub

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 70

TOP_LEVEL = {
    *(".ci", ".git", ".gitignore", "LICENSE", "Makefile", "README.md"),
    *("SECURITY.md", "mkdocs.yml"),
    *("docs", "examples", "pyproject.toml", "reliablepub", "spark_sink", "tests"),
}
MAY_PRINT = ("reliablepub/cli/", "reliablepub/demo/", "reliablepub/testing/command.py")

MODULES = [
    pytest.param(path, id=str(path.relative_to(ROOT)))
    for package in ("reliablepub", "spark_sink")
    for path in sorted((ROOT / package).rglob("*.py"))
]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Its lines without the docstring: explaining is never too long."""
    start, end = function.lineno, function.end_lineno
    assert end is not None
    if ast.get_docstring(function) is not None:
        docstring_end = function.body[0].end_lineno
        assert docstring_end is not None
        start += docstring_end - function.body[0].lineno + 1
    return end - start + 1


def test_everybody_imports_downwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)  # it disables our loggers
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize(
    "module",
    [
        *("reliablepub.testing", "reliablepub.cli", "click", "rich", "sqlite_utils", "aio_pika"),
        *("reliablepub.observe", "prometheus_client", "opentelemetry"),
        "reliablepub.outbox.admin",
    ],
)
def test_importing_the_package_does_not_load_what_a_producer_never_needs(module: str) -> None:
    code = f"import reliablepub, sys; sys.exit({module!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", MODULES)
def test_functions_fit_into_a_head(path: Path) -> None:
    too_long = {f.name: lines_of(f) for f in functions(ast.parse(path.read_text()))}
    assert {name: n for name, n in too_long.items() if n > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("path", MODULES)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.relative_to(ROOT).as_posix().startswith(MAY_PRINT):
        return
    prints = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert prints == []


def test_all_is_what_the_package_offers() -> None:
    offered = {
        name
        for name, value in vars(reliablepub).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    } - {"TYPE_CHECKING", "Final", "import_module"}
    offered |= {name for name in reliablepub._ADMIN if getattr(reliablepub, name)}
    assert len(reliablepub.__all__) == len(set(reliablepub.__all__))
    assert {name for name in reliablepub.__all__ if not name.startswith("_")} == offered


def test_top_level_is_the_agreed_one() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    strangers = {
        path.name
        for path in ROOT.iterdir()
        if path.name not in TOP_LEVEL
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert strangers == set()
