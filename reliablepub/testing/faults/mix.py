"""A fault that is another one each time.

This module must never know how the broker carries any of them out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf(PublishFault):
    """Acts as one of several faults, drawn at random each time; the broker's seed repeats it.

    When it acts is said here; what the faults inside say about that (`nth`, `share`, `times`,
    `keep`, `routing_key`) is not looked at.

    Attributes:
        faults: Faults of publishes.
    """

    kind = "any_of"
    faults: tuple[PublishFault, ...]

    def __post_init__(self) -> None:
        """There must be something to draw, and no second drawing inside."""
        PublishFault.__post_init__(self)
        drawable = (
            isinstance(one, PublishFault) and not isinstance(one, AnyOf) for one in self.faults
        )
        if not self.faults or not all(drawable):
            raise ValueError("faults must be one or more faults of publishes")
