"""Faults: what the broker shall do wrong, as small rules that are data.

A rule acts once unless it says otherwise (after the control functions of franz-go's kfake): `nth`
picks one event, `share` a random part of them, `times` how often, `keep` for ever. Rules compose:
every rule that matches an event acts on it, in the order they were injected.
This module knows when a rule acts. It must never know how the broker carries it out.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, ClassVar

from reliablepub.testing.replies import NAMES

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rule; the events it counts are publishes, or connections for `RefuseHandshake`.

    Attributes:
        nth: Act on the nth event it sees, from 1, and not before.
        share: Act on this share of the events, at random (0 to 1), until taken away.
        times: Act at most this often.
        keep: Act on every event it matches, unless `times` limits it.
    """

    kind: ClassVar[str]

    nth: int | None = None
    share: float | None = None
    times: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        """Refuse a rule that could never act or says two things at once."""
        if self.nth is not None and self.nth < 1:
            raise ValueError("nth counts from 1")
        if self.times is not None and self.times < 1:
            raise ValueError("times must be 1 or more")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError("share must be between 0 and 1")

    @property
    def times_max(self) -> int | None:
        """How often it acts; None is without end."""
        if self.times is None and (self.keep or self.share is not None):
            return None
        return self.times or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishFault(Fault):
    """A rule about publishes; with `routing_key` it sees only those with this key."""

    routing_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack(PublishFault):
    """No queue takes the message; its confirm is a basic.nack."""

    kind = "nack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Return(PublishFault):
    """The message is unroutable, whatever is bound: basic.return (if mandatory), then the ack."""

    kind = "return"


@dataclass(frozen=True, slots=True, kw_only=True)
class LateReturn(PublishFault):
    """A basic.return after the ack of a message that was routed: RabbitMQ never does this."""

    kind = "late_return"


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldConfirms(PublishFault):
    """Confirms are not sent until `FakeBroker.release_confirms()`; for every publish it matches."""

    kind = "hold_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConfirm(PublishFault):
    """The message is taken and its confirm never sent."""

    kind = "drop_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateConfirm(PublishFault):
    """The confirm is sent, and sent again singly."""

    kind = "duplicate_confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleConfirms(PublishFault):
    """Confirms that fall due together are sent singly, in random order."""

    kind = "shuffle_confirms"
    keep: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StrayAck(PublishFault):
    """With the confirm of the publish comes an ack that confirms nothing that is in flight.

    Attributes:
        beyond: The tag is this far beyond the last one opened on the channel.
        tag: The tag itself: a number never used or long settled; 0 with `multiple` means all.
        multiple: The flag of the stray ack.
    """

    kind = "stray_ack"
    beyond: int | None = None
    tag: int | None = None
    multiple: bool = False

    def __post_init__(self) -> None:
        """Exactly one of the two ways to name the tag."""
        PublishFault.__post_init__(self)
        if (self.beyond is None) == (self.tag is None):
            raise ValueError("say either beyond or tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingFault(PublishFault):
    """Ends a channel, a connection or the broker at a publish.

    Attributes:
        accepted: Whether the queues take the message first; its confirm is lost either way.
    """

    accepted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseChannel(EndingFault):
    """channel.close, naming basic.publish (60, 40); all that is in flight stays undecided."""

    kind = "close_channel"
    code: int = 406
    text: str = "closed by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        PublishFault.__post_init__(self)
        _check_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseConnection(EndingFault):
    """connection.close."""

    kind = "close_connection"
    code: int = 320
    text: str = "closed by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        PublishFault.__post_init__(self)
        _check_code(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropConnection(EndingFault):
    """The TCP connection ends without a word.

    Attributes:
        reset: RST; otherwise FIN.
    """

    kind = "drop_connection"
    reset: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(EndingFault):
    """The broker dies as by kill -9: connections are reset and the port refuses.

    What is not written (transient messages, and persistent ones whose batch is not on disk) is
    lost; with `accepted` the message at hand is written first. It comes back on the same port.

    Attributes:
        down_for_s: For how long the port refuses; None is until `FakeBroker.start()`.
        lose_unsynced: False loses transient messages only.
    """

    kind = "crash"
    down_for_s: float | None = None
    lose_unsynced: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(PublishFault):
    """A resource alarm begins at the publish, which is withheld (connection.blocked).

    Attributes:
        for_s: How long the alarm lasts; None is until `FakeBroker.unblock()`.
    """

    kind = "block"
    reason: str = "low on memory"
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(PublishFault):
    """The broker stops reading and answering at the publish, heartbeats too, as by SIGSTOP.

    Attributes:
        for_s: How long it is frozen; None is until `FakeBroker.thaw()`.
    """

    kind = "freeze"
    for_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseHandshake(Fault):
    """A new connection is refused after connection.start-ok.

    Attributes:
        code: The reply code of connection.close; None closes the socket without a word.
        text: The reply text after the name of the code.
    """

    kind = "refuse_handshake"
    code: int | None = 403
    text: str = "refused by a fault"

    def __post_init__(self) -> None:
        """The reply code must be one of AMQP's."""
        Fault.__post_init__(self)
        if self.code is not None:
            _check_code(self.code)


def _check_code(code: int) -> None:
    if code not in NAMES:
        message = f"{code} is not an AMQP reply code"
        raise ValueError(message)


KINDS: dict[str, type[Fault]] = {
    kind.kind: kind
    for kind in (
        Nack,
        Return,
        LateReturn,
        HoldConfirms,
        DropConfirm,
        DuplicateConfirm,
        ShuffleConfirms,
        StrayAck,
        CloseChannel,
        CloseConnection,
        DropConnection,
        Crash,
        Block,
        Freeze,
        RefuseHandshake,
    )
}


class _Rule:
    """An injected fault with what it has seen and done so far."""

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
        """Add rules; they see only events from now on."""
        for fault in faults:
            self._injected += 1
            random = Random(f"{self._seed}/{self._injected}")  # noqa: S311 - repeatable, no secret
            self._rules.append(_Rule(fault, random))

    def remove(self, kind: type[Fault]) -> None:
        """Take away every rule of a kind."""
        self._rules = [rule for rule in self._rules if not isinstance(rule.fault, kind)]

    def on_publish(self, routing_key: str) -> tuple[Fault, ...]:
        """The faults that act on this publish."""
        if not self._rules:
            return ()
        return self._fire(
            [
                rule
                for rule in self._rules
                if isinstance(rule.fault, PublishFault)
                and rule.fault.routing_key in (None, routing_key)
            ]
        )

    def on_connection(self) -> tuple[Fault, ...]:
        """The faults that act on this new connection."""
        return self._fire([rule for rule in self._rules if isinstance(rule.fault, RefuseHandshake)])

    def _fire(self, rules: list[_Rule]) -> tuple[Fault, ...]:
        fired = tuple(rule.fault for rule in rules if rule.fires())
        if any(rule.is_spent for rule in rules):
            self._rules = [rule for rule in self._rules if not rule.is_spent]
        return fired


class FaultFileError(ValueError):
    """A fault file cannot be read; the message names the file, the entry and the key."""


def load_faults(path: Path) -> tuple[Fault, ...]:
    """The faults of a TOML file: `[[fault]]` tables with a `kind` and the fields of that kind.

    Raises:
        FaultFileError: The file is not TOML, or an entry has a wrong kind, key or value.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path}: {error}"
        raise FaultFileError(message) from error
    unknown = sorted(document.keys() - {"fault"})
    entries = document.get("fault", [])
    if unknown or not isinstance(entries, list):
        message = f"{path}: expected only [[fault]] tables, found {unknown or 'fault'}"
        raise FaultFileError(message)
    return tuple(_fault_of(f"{path}: fault {i}", entry) for i, entry in enumerate(entries, 1))


def _fault_of(where: str, entry: object) -> Fault:
    if not isinstance(entry, dict):
        message = f"{where}: expected a table, not {entry!r}"
        raise FaultFileError(message)
    values = dict(entry)
    name = values.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        message = f"{where}: kind {name!r} is none of {', '.join(sorted(KINDS))}"
        raise FaultFileError(message)
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            message = f"{where} ({name}): unknown key {key!r}; known: {', '.join(sorted(fields))}"
            raise FaultFileError(message)
        if not _fits(value, fields[key]):
            message = f"{where} ({name}): {key} must be {fields[key]}, not {value!r}"
            raise FaultFileError(message)
    try:
        return kind(**values)
    except ValueError as error:
        message = f"{where} ({name}): {error}"
        raise FaultFileError(message) from error


def _fits(value: object, annotation: str) -> bool:
    """Whether a TOML value fits a field's annotation (`int | None`, `float`, `bool`, `str`)."""
    wanted = set(re.findall(r"\w+", annotation))
    return type(value).__name__ in wanted or (type(value) is int and "float" in wanted)
