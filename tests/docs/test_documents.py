"""What the documents show is true: code runs, commands exist, links lead somewhere."""

import ast
import html
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import celery._state
import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import reliablepub
import reliablepub.testing
from reliablepub.cli import main
from reliablepub.observe.catalogue import CATALOGUE
from reliablepub.testing.faults import KINDS as KINDS_OF_FAULTS
from tests.cli.test_app import commands as commands_of_ours
from tests.docs.documents import (
    DOCUMENTS,
    KINDS,
    README,
    ROOT,
    anchors,
    blocks,
    commands,
    links,
    needs_postgres,
    run,
    run_as_seen,
)
from tests.speed import bars


def is_run_elsewhere(name: str) -> bool:
    """Spark's page runs in tests/spark; the two that need an outbox with troubles in tests/cli."""
    return name in ("docs/spark.md", "docs/cli.md", "docs/on-call.md")


NAMES = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS]
RUN_HERE = [
    pytest.param(path, id=name.id, marks=[pytest.mark.postgres] if needs_postgres(path) else [])
    for path, name in zip(DOCUMENTS, NAMES, strict=True)
    if not is_run_elsewhere(str(name.id))
]
TESTED = sorted((ROOT / "examples").glob("test_*.py"))
SCRIPTS = sorted(set((ROOT / "examples").glob("*.py")) - set(TESTED))
EXAMPLES = [pytest.param(path, id=path.name) for path in SCRIPTS]


@pytest.fixture
def _no_tasks_left() -> Iterator[None]:
    """Celery adds the tasks of a document to every later application, and warns of equal names."""
    shared: set[object] = celery._state._on_app_finalizers
    before = set(shared)
    yield
    shared &= before
    celery._state._set_current_app(None)


@pytest.mark.usefixtures("_no_tasks_left")
@pytest.mark.timeout(300)  # each command starts a process
@pytest.mark.parametrize("document", RUN_HERE)
def test_a_document_runs(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if needs_postgres(document):
        run(document, tmp_path, request.getfixturevalue("postgres_url"))
    else:
        run(document, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["README", "guide", "asyncio", "outbox", "consumers", "observing"])
def test_a_page_runs_without_what_only_the_tests_see(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_as_seen(README if name == "README" else ROOT / "docs" / f"{name}.md", tmp_path)


OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PIP = re.compile(r"pip install (?:'\.\[(?P<extras>[\w,]+)\]')?(?P<others>[\w -]*)")


@pytest.mark.parametrize("name", ["celery", "django", "fastapi", "sqlalchemy", "task-queues"])
def test_a_page_installs_what_it_imports(name: str) -> None:
    """Here everything is installed; a reader has what the page says."""
    page = ROOT / "docs" / f"{name}.md"
    text = page.read_text()
    installed = {"reliablepub"}
    for found in PIP.finditer(text):
        extras = (found["extras"] or "").split(",")
        asked = [Requirement(one) for extra in extras for one in OPTIONAL.get(extra, ())]
        installed |= {canonicalize_name(one.name) for one in asked} | set(found["others"].split())
    code = "".join(block.text for block in blocks(page) if block.language == "python")
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE))
    imported |= set(re.findall(r"sqlite\+(\w+)", code))  # drivers
    assert imported - sys.stdlib_module_names - installed == set()


def test_the_command_that_installs_has_one_wording() -> None:
    """Until there is a package: in a clone. Once there is one, all of them change together."""
    lines = [
        line
        for page in (ROOT / "docs").glob("*.md")
        for line in page.read_text().splitlines()
        if line.startswith(("$ pip install", "pip install"))
    ]
    assert len(lines) >= 9
    where = "        # in a clone of the repository"
    wording = re.compile(rf"\$ pip install '\.\[[\w,]+\]'[\w ]*{where}(?:; with PostgreSQL .*)?")
    assert [line for line in lines if not wording.fullmatch(line)] == []


def test_an_extra_brings_what_its_integration_imports() -> None:
    """SQLAlchemy installs greenlet, which its asyncio needs, only with an extra of its own."""
    assert Requirement(OPTIONAL["sqlalchemy"][0]).extras == {"asyncio"}


@pytest.mark.timeout(300)
def test_the_tutorial_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(ROOT / "docs" / "tutorial.md", tmp_path, pasted=True)


def test_a_command_that_fails_or_prints_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "document.md"
    document.write_text("```console\n$ export WORD=b\n$ echo a$WORD \\\n    c\na... c\n```\n")
    run(document, tmp_path)
    for wrong in ("$ echo a\nb\n", "$ reliablepub outbox status\n"):
        document.write_text(f"```console\n{wrong}```\n")
        with pytest.raises(AssertionError):
            run(document, tmp_path)


def test_a_line_that_the_prompt_cannot_take_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("```python\nif True:\n    x = 1\n\n    y = 2\n```\n")
    run(document, tmp_path)
    with pytest.raises(IndentationError):
        run(document, tmp_path, pasted=True)


def test_the_collector_finds_blocks_and_lets_them_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "document.md"
    document.write_text(
        "Text\n\n```python\nx = 1\n```\n\n```text\n?\n```\n\n```python\nx / 0\n```\n"
    )
    assert [block.language for block in blocks(document)] == ["python", "text", "python"]
    with pytest.raises(ZeroDivisionError) as caught:
        run(document, tmp_path)
    assert caught.traceback[-1].lineno == 11  # the line in the document, counted from 0


@pytest.mark.parametrize("document", NAMES)
def test_every_command_shown_exists(document: Path) -> None:
    for words in commands(document):
        if words[0] == "make":
            assert_target(words[1])
        else:
            assert_command(words[1:])


@pytest.mark.parametrize("document", NAMES)
def test_every_path_module_and_extra_shown_exists(document: Path) -> None:
    """For the commands that are not run here: they take hours, the network or root."""
    text = document.read_text()
    for path in re.findall(r"(?<![\w/.])(?:tests|examples)/[\w./]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:tests|spark_sink|reliablepub)[\w.]*)", text):
        assert find_spec(module) is not None, module
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # No index has the package yet: each page installs it from a clone.
    for where, names in re.findall(r"'([\w.]*)\[([\w,]+)\]'", text):
        if where in {".", "reliablepub"}:
            assert set(names.split(",")) <= set(project["optional-dependencies"]), names
            assert where == ".", names


def assert_target(name: str) -> None:
    """The Makefile has it, perhaps by a list of targets, as ``spark-4.0``; files are none."""
    command = ["make", "--print-data-base", "--question", "clean"]
    rules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    rules = re.sub(r"^# Not a target:\n.*$", "", rules, flags=re.MULTILINE)
    assert re.search(rf"^{re.escape(name)}:", rules, re.MULTILINE), f"make {name}"


def assert_command(words: list[str]) -> None:
    """Commands, subcommands and long options exist; values are not looked at."""
    command: click.Command = main
    shown = " ".join(words)
    context = click.Context(command)
    for word in words:
        if word.isupper():
            return  # a placeholder, such as COMMAND
        if word.startswith("--"):
            names = {
                name for p in command.get_params(context) for name in (*p.opts, *p.secondary_opts)
            }
            assert word.split("=")[0] in names, f"{word} in: reliablepub {shown}"
        elif isinstance(command, click.Group):
            found = command.get_command(context, word)
            assert found is not None, f"{word} in: reliablepub {shown}"
            assert "cannot be loaded" not in (found.help or ""), found.help
            command = found
            context = click.Context(command, parent=context)


@pytest.mark.parametrize("document", NAMES)
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in links(document):
        target, _, fragment = link.partition("#")
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), link
        if fragment:
            assert fragment in anchors(path), link


@pytest.mark.parametrize("document", NAMES)
def test_a_link_shows_a_title_and_no_file_name(document: Path) -> None:
    assert re.findall(r"\[[\w/-]+\.md\]\(", document.read_text()) == []


def test_the_site_has_four_kinds_of_pages_and_every_page() -> None:
    nav = re.findall(
        r"^  ( *)- (?:([\w -]+):)?(.*)$",
        (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2],
        re.MULTILINE,
    )
    kinds = [title for indent, title, page in nav if not indent and not page]
    assert kinds == KINDS
    pages = [page.strip() for indent, _, page in nav if indent]
    of_the_root = ["MAINTAINERS.md", "SECURITY.md", "SUPPORT.md"]
    assert sorted(pages) == sorted([*of_the_root, *(p.name for p in (ROOT / "docs").glob("*.md"))])


def test_the_first_page_links_every_page_under_its_kind() -> None:
    text = README.read_text().partition("## Documentation")[2]
    kinds, linked = (
        re.findall(r"^### (.*)$", text, re.MULTILINE),
        re.findall(r"docs/([\w-]+\.md)\)", text),
    )
    assert kinds == KINDS
    assert set(linked) == {path.name for path in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("document", NAMES)
def test_a_page_begins_with_what_the_reader_came_for(document: Path) -> None:
    """A title, then a paragraph: no heading, code or table before it."""
    title, blank, first = document.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert blank == ""
    assert re.match(r"[\w`*]", first), first


@pytest.mark.parametrize("document", NAMES)
def test_a_reader_is_told_where_the_exchange_of_the_examples_comes_from(document: Path) -> None:
    """The tests declare it out of the reader's sight; without it, each example waits in vain."""
    found = list(blocks(document))
    hidden = "".join(block.text for block in found if block.language == "setup")
    if 'broker.declare_exchange("orders"' in hidden:
        setup = re.compile(r"^<!-- setup.*?^-->$", re.DOTALL | re.MULTILINE)
        seen = setup.sub("", document.read_text())
        assert "tutorial.md#1-start-a-broker" in seen or "exchange `orders` of type `topic`" in seen


@pytest.mark.parametrize(
    "told",
    [
        pytest.param("It is never silently lost", id="promise"),
        pytest.param('.execute("INSERT INTO orders VALUES (?, ?)", (1, 250))', id="transaction"),
    ],
)
def test_it_is_told_once(told: str) -> None:
    assert sum(path.read_text().count(told) for path in DOCUMENTS) == 1


def test_the_file_map_shows_every_package_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    file_map = text.partition("<!-- file map")[2].partition("```text\n")[2].partition("```")[0]
    shown = re.findall(r"(?<!\S)[a-z_/]+/(?!\S)", file_map)
    packages = {
        path.parent.relative_to(ROOT).as_posix().removeprefix("reliablepub/") + "/"
        for folder in ("reliablepub", "spark_sink")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(shown) == packages


def test_the_picture_of_the_performance_page_shows_its_table() -> None:
    page = bars.PAGE.read_text()
    names = [way.name for way in bars.rows(page)]
    assert len(names) > 5, "the table is read"
    assert "Publisher, on disk" in names
    again = "draw it again: python -m tests.speed.bars"
    assert bars.PICTURE.read_text() == bars.drawn(page), again


def test_the_figures_of_the_readme_are_those_of_the_performance_page() -> None:
    lines = README.read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "/performance.md" in line]
    figures = re.findall(r"\b\d{1,3}(?: \d{3})+\b|\b\d+ µs", " ".join(rows))
    assert len(figures) > 5, "the table is read"
    shown = set(re.findall(r"\b\d{1,3}(?: \d{3})+\b|\b\d+ µs", bars.PAGE.read_text()))
    assert set(figures) <= shown


def test_the_walk_of_a_message_names_what_there_is() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text.partition("### One message")[2].partition("###")[0]
    steps = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", walk, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
    for file, names in re.findall(r"`([\w/]+\.py)` `([\w.]+)`", text):
        found: object = import_module(f"reliablepub.{file[:-3].replace('/', '.')}")
        for name in names.split("."):
            found = getattr(found, name)


@pytest.mark.timeout(300)
def test_the_site_builds_and_has_the_whole_api_and_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert_has_every_option(html.unescape((tmp_path / "cli" / "index.html").read_text()))
    observing = (tmp_path / "observing" / "index.html").read_text()
    assert [metric.name for metric in CATALOGUE if metric.name not in observing] == []
    spark = (tmp_path / "spark" / "index.html").read_text()
    assert "may take before the row is sent again" in spark
    faults = (tmp_path / "fake-broker" / "index.html").read_text()
    assert [kind for kind in KINDS_OF_FAULTS if f"<td><code>{kind}</code></td>" not in faults] == []
    modules = (tmp_path / "architecture" / "index.html").read_text()
    assert "One turn of the relay: take in, commit, send." in modules
    assert modules.count("reliablepub/outbox/sqlite/") == 1
    api = (tmp_path / "api" / "index.html").read_text()
    shown = set(re.findall(r'id="reliablepub\.(\w+)"', api))
    assert set(reliablepub.__all__) <= shown
    for module in (reliablepub.testing, import_module("spark_sink")):  # needs pyspark
        shown = set(re.findall(rf'id="{module.__name__}\.(\w+)"', api))
        assert set(module.__all__) - {"faults"} <= shown
    assert re.findall(r'<h3 id="([\w.]+)"', api)[0] == "reliablepub.Publisher"
    text = re.sub(r"<[^>]+>", "", api)
    private = re.findall(r"= _[A-Za-z]\w*|= \(lambda", text)
    assert private == [], "a default that the reader cannot look up"
    # Nothing that the theme would have to fetch a program for.
    assert [page for page in tmp_path.rglob("*.html") if "mermaid" in page.read_text()] == []


def assert_has_every_option(page: str) -> None:
    """Each command's usage is on the page, followed by each of its options."""
    for name, command in commands_of_ours():
        assert f"Usage: {name} " in page, name
        shown = page.partition(f"Usage: {name} ")[2].partition("Usage: ")[0]
        for option in command.params:
            if isinstance(option, click.Option):
                assert set(option.opts) <= set(re.findall(r"--[\w-]+", shown)), name


def test_every_error_is_explained() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    explained = {name: again for name, again, _, _ in rows}
    errors = {
        name: "yes" if value.retryable else "no"
        for name, value in vars(reliablepub).items()
        if isinstance(value, type) and issubclass(value, reliablepub.ReliablePubError)
    }
    assert explained == errors


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_by_one_command(example: Path, tmp_path: Path) -> None:
    assert_prints(start(example, tmp_path), example)


@pytest.mark.rabbit
def test_every_example_runs_on_a_url(rabbitmq_url: str, tmp_path: Path) -> None:
    """All at once: what they use at the broker has names of their own, and is gone at their end."""
    running = [(start(each, tmp_path, rabbitmq_url), each) for each in SCRIPTS]
    for process, example in running:
        assert_prints(process, example)


@pytest.mark.parametrize("tests", [pytest.param(path, id=path.name) for path in TESTED])
def test_the_tests_of_an_example_pass(tests: Path, tmp_path: Path) -> None:
    """As a reader runs them: with pytest's own settings."""
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-c",
        "/dev/null",
    ]
    done = subprocess.run(
        [sys.executable, *command, f"--basetemp={tmp_path}/pytest", str(tests)],
        cwd=tests.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert f"../examples/{tests.name})" in (ROOT / "docs" / "examples.md").read_text()


def start(example: Path, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(example), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_prints(process: subprocess.Popen[str], example: Path) -> None:
    """It prints what it says at its top."""
    docstring = ast.get_docstring(ast.parse(example.read_text())) or ""
    expected = textwrap.dedent(docstring.partition("It prints::\n\n")[2]).splitlines()
    assert expected
    try:
        printed, complaints = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, complaints
    assert printed.splitlines() == expected, complaints


def test_every_example_is_listed() -> None:
    assert EXAMPLES
    listed = (ROOT / "docs" / "examples.md").read_text()
    for example in EXAMPLES:
        assert f"../examples/{example.id})" in listed
