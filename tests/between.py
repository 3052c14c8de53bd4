"""What a test does in the middle of the product: before a call of its functions, or after it."""

from collections.abc import Callable
from typing import Any

import pytest


def before(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, do: Callable[..., object]
) -> None:
    """Have something done before each call of an attribute, with the same arguments.

    What is said last is done first.
    """
    call = getattr(target, name)

    def called(*arguments: Any, **options: Any) -> Any:
        do(*arguments, **options)
        return call(*arguments, **options)

    monkeypatch.setattr(target, name, called)


def after(
    monkeypatch: pytest.MonkeyPatch, target: object, name: str, do: Callable[..., object]
) -> None:
    """The same, after each call."""
    call = getattr(target, name)

    def called(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        do(*arguments, **options)
        return result

    monkeypatch.setattr(target, name, called)
