"""The rules of the house as tests: who imports whom, how big things get, what is shipped.

What a linter can check is ruff's and mypy's affair: docstrings, names, types.
"""

import ast
import fnmatch
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import reliablepub

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 70
INTEGRATION_LINES_MAX = 300

TOP_LEVEL = {
    *(".ci", ".git", ".gitignore", "LICENSE", "Makefile", "README.md"),
    *(
        "CONTRIBUTING.md",
        "Containerfile",
        "SECURITY.md",
        "CHANGELOG.md",
        "CODE_OF_CONDUCT.md",
        "MAINTAINERS.md",
        "SUPPORT.md",
        "action.yml",
        "mkdocs.yml",
    ),
    *("docs", "examples", "pyproject.toml", "reliablepub", "spark_sink", "tests"),
}
MAY_PRINT = ("reliablepub/cli/", "reliablepub/demo/", "reliablepub/testing/command.py")

PATHS = [
    path
    for package in ("reliablepub", "spark_sink")
    for path in sorted((ROOT / package).rglob("*.py"))
]
MODULES = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PATHS]


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


def test_modules_import_downwards_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)  # it disables our loggers
    assert lint_imports(str(ROOT / "pyproject.toml"), no_cache=True) == EXIT_STATUS_SUCCESS


NOBODY_NEEDS = [
    *("reliablepub.testing", "reliablepub.cli", "click", "rich", "sqlite_utils", "aio_pika"),
    *("reliablepub.observe", "prometheus_client", "opentelemetry", "reliablepub.outbox.admin"),
    *("reliablepub.integrations", "sqlalchemy", "django", "celery", "starlette", "taskiq"),
]
ENQUEUE = "with reliablepub.Outbox(path) as o: o.enqueue(reliablepub.Message(b'x'))"
IN_MEMORY = "reliablepub.Publisher('amqp://127.0.0.1:1', outbox=None, close_timeout_s=0).close()"
ON_DISK = "reliablepub.Publisher('amqp://127.0.0.1:1', outbox=path, close_timeout_s=0).close()"
COMMAND = (
    "import contextlib; from reliablepub.cli.app import main; "
    "with contextlib.suppress(SystemExit): main(['outbox', 'list', '--outbox', path])"
)
WHOLE_NAMES = "[getattr(reliablepub, name) for name in reliablepub.__all__]"


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("", [*NOBODY_NEEDS, "pika", "asyncio", "ssl", "sqlite3", "reliablepub.relay"]),
        (ENQUEUE, [*NOBODY_NEEDS, "pika", "asyncio", "ssl", "reliablepub.relay"]),
        (IN_MEMORY, [*NOBODY_NEEDS, "reliablepub.outbox.sqlite", "sqlite3"]),
        (ON_DISK, [*NOBODY_NEEDS, "reliablepub.outbox.memory"]),
        (COMMAND, ["pika", "asyncio", "importlib.metadata", "reliablepub.relay.relay", "rich"]),
        (WHOLE_NAMES, ["reliablepub.testing", "reliablepub.cli", "aio_pika"]),
    ],
    ids=["import", "enqueue", "memory", "disk", "command", "every name"],
)
def test_a_program_loads_only_what_it_needs(
    program: str, unneeded: list[str], tmp_path: Path
) -> None:
    loaded = f"sorted(set({unneeded}) & set(sys.modules))"
    code = f"import reliablepub, sys; path = sys.argv[1]; {program or 0}; sys.exit({loaded})"
    code = code.replace("; with", "\nwith").replace("; sys.exit", "\nsys.exit")
    outbox = str(tmp_path / "outbox.db")
    result = subprocess.run(
        [sys.executable, "-c", code, outbox], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stderr.splitlines()[-1] == "[]"  # before it, perhaps that there is no broker


@pytest.mark.parametrize("path", MODULES)
def test_functions_fit_into_a_head(path: Path) -> None:
    too_long = {f.name: lines_of(f) for f in functions(ast.parse(path.read_text()))}
    assert {name: n for name, n in too_long.items() if n > FUNCTION_LINES_MAX} == {}


def test_an_integration_is_small() -> None:
    folder = ROOT / "reliablepub" / "integrations"
    lines = {path: len(path.read_text().splitlines()) for path in folder.rglob("*.py")}
    assert {path: n for path, n in lines.items() if n > INTEGRATION_LINES_MAX} == {}


def is_product(path: Path) -> bool:
    """Not the fake broker, which is a program by itself, nor the sink for Spark."""
    return "testing" not in path.parts and "spark_sink" not in path.parts


def code_lines(text: str) -> int:
    """Its lines without docstrings, comments and blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for n, s in lines if n not in docstrings and s.strip()[:1] not in {"", "#"})


def weights() -> dict[str, int]:
    paths = [path for path in PATHS if is_product(path)]
    product = [path.read_text() for path in paths]
    rooms = Counter(
        str(path.parent.relative_to(ROOT)) for path in paths if path.name != "__init__.py"
    )
    tests = (ROOT / "tests").rglob("*.py")
    return {
        "lines of Python": sum(len(text.splitlines()) for text in product),
        "of these, code": sum(map(code_lines, product)),
        "classes": sum(len(re.findall(r"^ *class \w", text, re.MULTILINE)) for text in product),
        "rooms of `outbox/sqlite/`": rooms["reliablepub/outbox/sqlite"],
        "rooms of `transport/`": rooms["reliablepub/transport"],
        "rooms of `relay/`": rooms["reliablepub/relay"],
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests),
    }


def test_the_house_weighs_no_more_than_its_page_says() -> None:
    """What makes it heavier is told there; and what makes it lighter, so that it stays so."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    told = {
        what: int(number.replace(" ", ""))
        for what, number in re.findall(r"^\| ([^|]+) \| ([\d ]+) \|$", page, re.MULTILINE)
    }
    found = weights()
    assert {what: number for what, number in found.items() if number > told[what]} == {}
    assert {what: number for what, number in found.items() if number < 0.98 * told[what]} == {}


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


def test_a_log_line_has_an_event_that_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "observing.md").read_text()))
    modules = (ROOT / "reliablepub").rglob("*.py")
    found = {
        f"{path}:{node.lineno}": event_of(node)
        for path in modules
        if "testing" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in WRITES
    }
    assert found
    assert {at: event for at, event in found.items() if event not in documented} == {}


WRITES = {
    f"{logger}.{level}"
    for logger in ("LOGGER", "_LOG")
    for level in ("info", "warning", "error", "critical", "exception")
}


def event_of(call: ast.Call) -> str:
    """The event in the argument `extra` of a call that writes a log line; empty without one."""
    for argument in call.keywords:
        if argument.arg == "extra" and isinstance(argument.value, ast.Dict):
            pairs = zip(argument.value.keys, argument.value.values, strict=True)
            texts = {ast.unparse(key): value for key, value in pairs if key is not None}
            return str(ast.literal_eval(texts["'event'"]))
    return ""


def test_all_is_what_the_package_offers() -> None:
    assert dir(reliablepub) == sorted(reliablepub.__all__)
    assert len(reliablepub.__all__) == len(set(reliablepub.__all__))
    imported = {
        alias.name: f"{node.module}"
        for node in ast.walk(ast.parse(Path(reliablepub.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("reliablepub.")
        for alias in node.names
    }
    assert set(imported) == set(reliablepub.__all__)
    for name, module in reliablepub._LAZY.items():
        assert imported[name] == f"reliablepub.{module}", "type checkers read the imports"
    for name in reliablepub.__all__:
        assert getattr(reliablepub, name) is getattr(importlib.import_module(imported[name]), name)


def test_top_level_is_the_agreed_one() -> None:
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    strangers = {
        path.name
        for path in ROOT.iterdir()
        if path.name not in TOP_LEVEL
        and not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    assert strangers == set()
