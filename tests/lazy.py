"""A lazy proxy of an object, as werkzeug's `LocalProxy` and Django's `SimpleLazyObject` are.

It must never know what its object is.
"""

from collections.abc import Iterator
from typing import Any


class Lazy:
    """`isinstance` takes it for its object, and so does every operator; `type` does not."""

    def __init__(self, of: Any) -> None:
        self._of = of

    @property  # type: ignore[misc]  # it can be set in `object`
    def __class__(self) -> Any:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __add__(self, other: Any) -> Any:
        return self._of + other

    def __radd__(self, other: Any) -> Any:
        return other + self._of

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._of)

    def __bool__(self) -> bool:
        return bool(self._of)
