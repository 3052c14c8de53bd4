"""The public API as text: every public name with its signature, one a line.

Of integrations, metrics and traces, the names that the API page shows are public; of the Spark sink
also the options. ``python -m tests.packaging.public_api`` writes ``public_api.txt``.
"""

import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin, is_typeddict

RECORD = Path(__file__).with_name("public_api.txt")
PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"
WHOLE = (
    "reliablepub",
    "reliablepub.hooks",
    "reliablepub.testing",
    "reliablepub.testing.faults",
    "spark_sink",
)
_SHOWN = re.compile(
    r"^::: (?P<module>reliablepub\.(?:integrations|observe)\.[a-z_]+)(?:\.(?P<kind>[A-Z]\w*))?\n"
    r"    options:\n(?:      .*\n)*?      members: \[(?P<members>.*)\]$",
    re.MULTILINE,
)
"""A part of the API page that shows some members of a module, or a class with some of its own."""
_OURS = ("reliablepub", "spark_sink")


def public_api() -> dict[str, list[str]]:
    """The lines of each public module, by its name; of modules that are installed."""
    shown = {found["module"]: found for found in _SHOWN.finditer(PAGE.read_text())}
    api = {}
    for name in (*WHOLE, *sorted(shown)):
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:  # what the module integrates is not installed
            if (error.name or "").startswith(_OURS):
                raise
            continue
        lines = _of_module(module) if name in WHOLE else _of_page(module, shown[name])
        api[name] = [*lines, *(_options() if name == "spark_sink" else ())]
    return api


def recorded() -> dict[str, list[str]]:
    """What `public_api` was when it was recorded."""
    api: dict[str, list[str]] = {}
    for line in RECORD.read_text().splitlines():
        if line.startswith("# "):
            lines = api[line[2:]] = []
        else:
            lines.append(line)
    return api


def _options() -> Iterator[str]:
    from spark_sink.settings import TABLE  # noqa: PLC0415 - needs pyspark

    for option in TABLE:
        yield f"spark_sink option {option.metadata['name']} = {option.default!r}"


def _of_page(module: ModuleType, found: re.Match[str]) -> Iterator[str]:
    members = [name for name in found["members"].split(", ") if name]
    if found["kind"] is None:
        for name in members:
            yield from _of(f"{module.__name__}.{name}", getattr(module, name))
        return
    path = f"{module.__name__}.{found['kind']}"
    lines = list(_of(path, getattr(module, found["kind"])))
    yield lines[0]
    for name in members:
        yield next(line for line in lines if re.match(rf"{re.escape(path)}\.{name}\b", line))


def _of_module(module: ModuleType) -> Iterator[str]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    for name in sorted(names):
        yield from _of(f"{module.__name__}.{name}", getattr(module, name))


def _of(path: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield path  # its representation names the directory that it was loaded from
    elif not inspect.isclass(value):
        is_function = callable(value) and get_origin(value) is None  # no alias of a type
        yield f"{path}{_signature(value)}" if is_function else f"{path} = {value!r}"
    elif is_typeddict(value):
        yield from (f"{path}[{key}]: {kind}" for key, kind in _annotations(value).items())
    elif issubclass(value, enum.Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in value)
    else:
        yield f"{path}{_signature(value)}"
        yield from _members(path, value)


def _members(path: str, kind: type) -> Iterator[str]:
    ours = [one for one in kind.__mro__ if one.__module__.startswith(_OURS)]
    attributes = {name: note for one in reversed(ours) for name, note in _annotations(one).items()}
    found = {name: member for one in reversed(ours) for name, member in vars(one).items()}
    for name in sorted({*attributes, *found}):
        if name.startswith("_"):
            continue
        member = found.get(name)
        member = getattr(member, "__func__", member)  # of a class method
        if inspect.isfunction(member):
            yield f"{path}.{name}{_signature(member)}"
        elif isinstance(member, property):
            yield f"{path}.{name}: {_annotations(member.fget).get('return', '?')}"
        else:
            yield f"{path}.{name}: {attributes.get(name, '?')}"


def _annotations(of: Any) -> dict[str, str]:
    notes = inspect.get_annotations(of).items()
    return {name: str(getattr(note, "__forward_arg__", note)) for name, note in notes}


def _signature(of: Any) -> str:
    try:
        text = re.sub(r" at 0x\w+", "", str(inspect.signature(of)))
        return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    except ValueError:  # a builtin's, such as that of an exception without one of its own
        return "(...)"


if __name__ == "__main__":
    RECORD.write_text(
        "".join(f"# {name}\n" + "\n".join(lines) + "\n" for name, lines in public_api().items())
    )
