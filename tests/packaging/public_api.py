"""The public API as text: every public name with its signature, one a line.

``python -m tests.packaging.public_api`` writes it to ``public_api.txt``.
"""

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, is_typeddict

import reliablepub
import reliablepub.hooks
import reliablepub.testing
import reliablepub.testing.faults

RECORD = Path(__file__).with_name("public_api.txt")
MODULES = (reliablepub, reliablepub.hooks, reliablepub.testing, reliablepub.testing.faults)


def public_api() -> str:
    """Every public name of every public module."""
    return "".join(f"{line}\n" for module in MODULES for line in _of_module(module))


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
        yield path  # its representation names the folder that it was loaded from
    elif not inspect.isclass(value):
        yield f"{path}{_signature(value)}" if callable(value) else f"{path} = {value!r}"
    elif is_typeddict(value):
        yield from (f"{path}[{key}]: {kind}" for key, kind in _annotations(value).items())
    elif issubclass(value, enum.Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in value)
    else:
        yield f"{path}{_signature(value)}"
        yield from _members(path, value)


def _members(path: str, kind: type) -> Iterator[str]:
    ours = [one for one in kind.__mro__ if one.__module__.startswith("reliablepub")]
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
    return {name: str(note) for name, note in inspect.get_annotations(of).items()}


def _signature(of: Any) -> str:
    try:
        text = re.sub(r" at 0x\w+", "", str(inspect.signature(of)))
        return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    except ValueError:  # a builtin's, such as that of an exception without one of its own
        return "(...)"


if __name__ == "__main__":
    RECORD.write_text(public_api())
