"""What the site adds to the pages: README, examples, diagrams, help, and tables from code.

Called by mkdocs (``hooks`` in mkdocs.yml). Must never know: what a page says.

A forge draws the sequence diagrams of the pages (mermaid) itself. The site's theme would have the
reader's browser fetch a program of 3 MB from elsewhere for it, so they are drawn here, as far as
the pages need it: participants, arrows and notes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from reliablepub.cli import main
from reliablepub.observe.catalogue import CATALOGUE
from reliablepub.testing.faults import (
    KINDS,
    ConnectionFault,
    DeliveryFault,
    Fault,
    PublishFault,
)

ROOT = Path(__file__).parent.parent

ROOT_PAGES = ("README.md", "SUPPORT.md", "SECURITY.md", "MAINTAINERS.md")
DIAGRAM = re.compile(r"^```mermaid\nsequenceDiagram\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^#+ (reliablepub .+)$", re.MULTILINE)
FILE_MAP = re.compile(r"^<!-- file map.*?```text\n.*?```\n", re.MULTILINE | re.DOTALL)
METRICS = "<!-- the site shows every metric here -->"
OPTIONS = "<!-- the site shows every option here -->"
FAULTS = re.compile(
    r"^<!-- the site shows a table of these faults: (\w+) -->\n(?:.+\n)+", re.MULTILINE
)
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
ARROW = re.compile(r"(\w+)(--?)>>(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+): (.+)")
NO_PROMPT = re.compile(r'<span class="gp">(?!\$ )([^<]*)</span>([^\n<]*)')
"""Output of a command with a %, which other shells prompt with."""
MORE_PARAMETERS = re.compile(
    r"(doc-section-title\">Raises:(?:(?!doc-section-title|doc-object).)*doc-section-title\">)Parameters:",
    re.DOTALL,
)
CHARACTER, ROW, TOP, BOX, SELF = 6.8, 34, 44, 30, 22
"""Sizes, in pixels: of a character, from arrow to arrow, above the first, of a name, of a loop."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README as the first page, other pages of the root, and the examples as they are."""
    for name in ROOT_PAGES:
        # Seen from the site's root, everything in docs/ is one floor up.
        text = (
            (ROOT / name).read_text().replace("](docs/", "](").replace("](README.md", "](index.md")
        )
        page = "index.md" if name == "README.md" else name
        files.append(File.generated(config, page, content=text))
    examples = ROOT / "examples"
    for example in sorted((*examples.rglob("*.py"), examples / "chart" / "values.yaml")):
        name = example.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(example)))
    return files


def on_post_build(*, config: MkDocsConfig) -> None:
    """Beside the pages, their Markdown: llms.txt links to it."""
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, config.site_dir)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Links that lead out of this folder on a forge stay inside on the site."""
    if page.file.src_uri == "cli.md":
        markdown = COMMAND.sub(lambda found: f"{found[0]}\n\n{help_of(found[1])}", markdown)
    if page.file.src_uri == "architecture.md":
        markdown = FILE_MAP.sub(lambda _: file_map(), markdown)
    if page.file.src_uri == "observing.md":
        markdown = markdown.replace(METRICS, f"{METRICS}\n\n{metrics()}")
    if page.file.src_uri == "spark.md":
        from spark_sink.options import as_markdown  # noqa: PLC0415 - loads pyspark

        markdown = markdown.replace(OPTIONS, f"{OPTIONS}\n\n{as_markdown()}")
    if page.file.src_uri == "fake-broker.md":
        markdown = FAULTS.sub(lambda found: f"{faults(found[1])}\n", markdown)
    markdown = DIAGRAM.sub(lambda found: drawn(found[1]), markdown)
    return markdown.replace("](../", "](")


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    """Correct what a lexer takes for a prompt; on the API page, tell typed dictionaries apart."""
    html = NO_PROMPT.sub(r'<span class="go">\1\2</span>', html)
    if page.file.src_uri == "api.md":
        html = MORE_PARAMETERS.sub(r"\1Further parameters:", html)
        html = html.replace("<code>...</code>", "")  # each text tells its default
    return html


def file_map() -> str:
    """Every module, with the first line of its docstring."""
    lines = []
    for folder in ("reliablepub", "spark_sink"):
        for module in sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent, path)):
            told = (ast.get_docstring(ast.parse(module.read_text())) or "").partition("\n")[0]
            if module.stem == "__init__":
                lines.append(f"\n{module.parent.relative_to(ROOT).as_posix()}/\n{told}\n")
            elif module.stem != "__main__" and told:
                lines.append(f"  {module.stem:<18}{told}")
    shown = "\n".join(lines).strip()
    return f"```text\n{shown}\n```\n"


def metrics() -> str:
    """Every metric, as a table."""
    rows = ["| metric | type | |", "|---|---|---|"]
    for metric in CATALOGUE:
        values = ", ".join(f"`{value}`" for value in metric.values)
        by = f" by `{metric.label}`" if metric.label else ""
        name = f"`{metric.name}`{by}" + (f": {values}" if values else "")
        rows.append(f"| {name} | {metric.type} | {metric.means} |")
    return "\n".join(rows)


def faults(module: str) -> str:
    """The faults of a module of `reliablepub.testing.faults`, as a table."""
    rows = ["| `kind` | fields | what the broker does |", "|---|---|---|"]
    for name, kind in KINDS.items():
        if kind.__module__.rpartition(".")[2] == module:
            told, _, fields = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
            means = re.sub(r"^ +(\w+): ", r"`\1`: ", fields, flags=re.MULTILINE)
            own = ", ".join(_field(one) for one in dataclasses.fields(kind) if _is_own(one, kind))
            rows.append(f"| `{name}` | {own} | {' '.join(f'{told} {means}'.split())} |")
    return "\n".join(rows) + "\n"


def _is_own(field: dataclasses.Field[Any], kind: type[Fault]) -> bool:
    """Whether not every fault has it, with the same default."""
    every = {one.name: one.default for one in dataclasses.fields(_base_of(kind))}
    return field.name not in every or field.default != every[field.name]


def _base_of(kind: type[Fault]) -> type[Fault]:
    bases = (PublishFault, DeliveryFault, ConnectionFault)
    return next(base for base in bases if issubclass(kind, base))


def _field(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default is None or default == "":
        return f"`{field.name}`"
    return f"`{field.name}` ({str(default).lower() if isinstance(default, bool) else default})"


def help_of(name: str) -> str:
    """What ``--help`` prints for a command, and for each command of a group without sections."""
    command: click.Command = main
    context = click.Context(main, info_name="reliablepub")
    for word in name.split()[1:]:
        assert isinstance(command, click.Group)
        inner = command.get_command(context, word)
        assert inner is not None, name
        command, context = inner, click.Context(inner, info_name=word, parent=context)
    shown = [command.get_help(context)]
    if name == "reliablepub topology" and isinstance(command, click.Group):
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None, word
            shown.append(inner.get_help(click.Context(inner, info_name=word, parent=context)))
    return "\n".join(f"```text\n{text}\n```\n" for text in shown)


def drawn(diagram: str) -> str:
    """A sequence diagram as one line of SVG; ValueError for what is not understood."""
    lines = [line.strip() for line in diagram.splitlines()]
    names = {found[1]: found[2] for line in lines if (found := PARTICIPANT.fullmatch(line))}
    steps = [line for line in lines if not PARTICIPANT.fullmatch(line)]
    boxes = {key: len(name) * CHARACTER + 20 for key, name in names.items()}
    margin, gap = max(boxes.values()) / 2 + 2, max(_needed(names, steps))
    at = {key: margin + gap * place for place, key in enumerate(names)}
    width, height = 2 * margin + gap * (len(names) - 1), TOP + ROW * (len(steps) + 0.5)
    parts = [
        f'<svg class="sequence" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    ]
    for key, name in names.items():
        left = at[key] - boxes[key] / 2
        parts.append(f'<path d="M{at[key]:g} {BOX} V{height:g}"/>')
        parts.append(f'<rect x="{left:g}" y="1" width="{boxes[key]:g}" height="{BOX}" rx="4"/>')
        parts.append(f'<text x="{at[key]:g}" y="21">{escape(name)}</text>')
    for row, step in enumerate(steps):
        parts += _step(step, at, TOP + ROW * (row + 0.75))
    return "".join([*parts, "</svg>"])


def _needed(names: dict[str, str], steps: list[str]) -> Iterator[float]:
    """How far apart participants must be, for each text."""
    places = list(names)
    for one, other in pairwise(names.values()):
        yield (len(one) + len(other)) / 2 * CHARACTER + 40
    for step in steps:
        if arrow := ARROW.fullmatch(step):
            columns = abs(places.index(arrow[1]) - places.index(arrow[3])) or 1
            yield (len(arrow[4]) * CHARACTER + 30) / columns


def _step(step: str, at: dict[str, float], y: float) -> Iterator[str]:
    """One arrow or note."""
    if note := NOTE.fullmatch(step):
        width = len(note[2]) * CHARACTER + 16
        corner = f'x="{at[note[1]] - width / 2:g}" y="{y - 18:g}"'
        yield f'<rect class="note" {corner} width="{width:g}" height="24" rx="4"/>'
        yield f'<text x="{at[note[1]]:g}" y="{y - 2:g}">{escape(note[2])}</text>'
        return
    arrow = ARROW.fullmatch(step)
    if arrow is None:
        raise ValueError(f"draw it in docs/site.py, or write it otherwise: {step}")
    start, end = at[arrow[1]], at[arrow[3]]
    kind = "answer" if arrow[2] == "--" else "call"
    if start == end:  # a loop, its text beside it
        yield f'<path class="{kind}" d="M{start:g} {y - 10:g} h{SELF} v12 h{-SELF}"/>'
        yield f'<path class="tip" d="M{end:g} {y + 2:g} l8 -4 v8 z"/>'
        yield f'<text class="beside" x="{start + SELF + 6:g}" y="{y:g}">{escape(arrow[4])}</text>'
        return
    yield f'<path class="{kind}" d="M{start:g} {y:g} H{end:g}"/>'
    yield f'<path class="tip" d="M{end:g} {y:g} l{8 if end < start else -8} -4 v8 z"/>'
    yield f'<text x="{(start + end) / 2:g}" y="{y - 6:g}">{escape(arrow[4])}</text>'
