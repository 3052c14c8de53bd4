"""A fault that acts as a random one of several faults.

This module must never know how the broker carries out a fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from reliablepub.testing.faults.rule import PublishFault


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf(PublishFault):
    """Acts as one of several faults, drawn at random each time from the broker's seed.

    The fields `nth`, `share`, `times`, `keep` and `routing_key` of this rule say when it acts;
    those of the inner faults are ignored.

    Attributes:
        faults: Faults of publishes.
    """

    kind = "any_of"
    faults: tuple[PublishFault, ...]

    def __post_init__(self) -> None:
        """Refuse an empty list of faults, and an `AnyOf` within an `AnyOf`."""
        PublishFault.__post_init__(self)
        drawable = (
            isinstance(one, PublishFault) and not isinstance(one, AnyOf) for one in self.faults
        )
        if not self.faults or not all(drawable):
            raise ValueError("faults must be one or more faults of publishes")
