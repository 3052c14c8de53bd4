"""What mutmut leaves out by itself: properties and context managers, `transaction` among them.

It leaves every decorated function alone, since a decorator may have side effects. These have none,
and wrap whatever stands below them: so mutmut's switch between a function and its mutants can stand
there, and the copies it switches between go without.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import libcst as cst
from mutmut.mutation import file_mutation
from mutmut.mutation.file_mutation import (
    MODULE_STATEMENT,
    Mutation,
    MutationVisitor,
    function_trampoline_arrangement,
)

TRANSPARENT = ("property", "contextmanager")


def is_decorated_harmlessly(node: cst.CSTNode) -> bool:
    """Whether it is a function that only has such decorators."""
    return isinstance(node, cst.FunctionDef) and all(
        isinstance(decorator.decorator, cst.Name) and decorator.decorator.value in TRANSPARENT
        for decorator in node.decorators
    )


class _Visitor(MutationVisitor):
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        return super()._skip_node_and_children(
            node.with_changes(decorators=()) if is_decorated_harmlessly(node) else node
        )


def _arrangement(
    function: cst.FunctionDef, mutants: Iterable[Mutation], class_name: str | None
) -> tuple[
    Sequence[MODULE_STATEMENT],
    Sequence[MODULE_STATEMENT],
    Sequence[MODULE_STATEMENT],
    Sequence[str],
]:
    declared, nodes, assigned, names = function_trampoline_arrangement(
        function, mutants, class_name
    )
    if is_decorated_harmlessly(function):
        switch, *copies = nodes
        nodes = [switch, *(copy.with_changes(decorators=()) for copy in copies)]
    return declared, nodes, assigned, names


@contextmanager
def with_decorated_functions() -> Iterator[None]:
    """Have mutmut mutate these too."""
    with (
        patch.object(file_mutation, "MutationVisitor", _Visitor),
        patch.object(file_mutation, "function_trampoline_arrangement", _arrangement),
    ):
        yield
