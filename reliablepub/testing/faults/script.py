"""The fault script of a broker: the rules in force, and which of them act on an event.

Rules compose: every rule that matches an event acts on it, in the order of injection.
This module must never know how the broker carries out a fault.
"""

from __future__ import annotations

from random import Random

from reliablepub.testing.faults.mix import AnyOf
from reliablepub.testing.faults.rule import ConnectionFault, DeliveryFault, Fault, PublishFault


class _Rule:
    """An injected fault, with the number of events seen and of actions left."""

    def __init__(self, fault: Fault, random: Random) -> None:
        self.fault = fault
        self._random = random
        self._seen = 0
        self._left = fault.times_max

    def fires(self) -> bool:
        self._seen += 1
        if self._seen < (self.fault.nth or 1) or self._left == 0:
            return False
        share = self.fault.share
        if share is not None and self._random.random() >= share:
            return False
        if self._left is not None:
            self._left -= 1
        return True

    def draw(self) -> Fault:
        """The fault that acts; of an `AnyOf`, a random one."""
        return (
            self._random.choice(self.fault.faults) if isinstance(self.fault, AnyOf) else self.fault
        )

    @property
    def is_spent(self) -> bool:
        return self._left == 0


class FaultScript:
    """The rules in force. Each random rule draws from its own stream, seeded by its position."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._injected = 0
        self._rules: list[_Rule] = []

    def inject(self, *faults: Fault) -> None:
        """Add rules, which see only events from now on."""
        for fault in faults:
            self._injected += 1
            random = Random(f"{self._seed}/{self._injected}")  # noqa: S311 - repeatable, no secret
            self._rules.append(_Rule(fault, random))

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults in force, in the order of injection."""
        return tuple(rule.fault for rule in self._rules)

    def remove(self, kind: type[Fault]) -> None:
        """Remove every rule of a kind."""
        self._rules = [rule for rule in self._rules if not isinstance(rule.fault, kind)]

    def on_publish(self, routing_key: str) -> tuple[PublishFault, ...]:
        """The faults that act on this publish."""
        if not self._rules:
            return ()
        rules = [
            rule
            for rule in self._rules
            if isinstance(rule.fault, PublishFault)
            and rule.fault.routing_key in (None, routing_key)
        ]
        fired = self._fire(rules)
        return tuple(fault for fault in fired if isinstance(fault, PublishFault))

    def on_delivery(self, queue: str) -> tuple[DeliveryFault, ...]:
        """The faults that act on this delivery."""
        if not self._rules:
            return ()
        rules = [
            rule
            for rule in self._rules
            if isinstance(rule.fault, DeliveryFault) and rule.fault.queue in (None, queue)
        ]
        fired = self._fire(rules)
        return tuple(fault for fault in fired if isinstance(fault, DeliveryFault))

    def on_connection(self) -> tuple[ConnectionFault, ...]:
        """The faults that act on this new connection."""
        fired = self._fire([one for one in self._rules if isinstance(one.fault, ConnectionFault)])
        return tuple(fault for fault in fired if isinstance(fault, ConnectionFault))

    def _fire(self, rules: list[_Rule]) -> list[Fault]:
        fired = [rule.draw() for rule in rules if rule.fires()]
        if any(rule.is_spent for rule in rules):
            self._rules = [rule for rule in self._rules if not rule.is_spent]
        return fired
