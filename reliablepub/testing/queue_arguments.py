"""The arguments of queue.declare.

Knows: which values RabbitMQ accepts, and its reply texts. Must never know: what an argument does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

from reliablepub.testing.fields import field_type, is_integer
from reliablepub.testing.replies import AmqpError, crashed

Check = Callable[[object], str | None]
"""Returns the reason in RabbitMQ's reply text for a wrong value; None for a right one."""

TTL_MAX_MS = 315_360_000_000
"""Ten years."""

_MODULES = {
    "classic": "rabbit_classic_queue",
    "quorum": "rabbit_quorum_queue",
    "stream": "rabbit_stream_queue",
}
"""RabbitMQ's modules for the queue types, by `x-queue-type`."""
_AGE = re.compile(r"(\d+)(.*)", re.DOTALL)
_UNITS_S = {"Y": 31_536_000, "M": 2_592_000, "D": 86_400, "h": 3_600, "m": 60, "s": 1}


def check_queue_arguments(arguments: dict[str, Any], where: str) -> None:
    """Raise 406 for the first argument with a wrong value; unknown arguments are accepted."""
    dlx = arguments.get("x-dead-letter-exchange")
    if dlx is not None and not isinstance(dlx, str):
        wrong = f"invalid type '{field_type(dlx)}' for arg 'x-dead-letter-exchange' in {where}"
        raise AmqpError(406, wrong)
    kind = arguments.get("x-queue-type")
    kind = kind if kind in ("quorum", "stream") else "classic"
    foreign = _NOT_OF[kind]
    for name in (*_CHECKS, *foreign):
        value = arguments.get(name)
        if name in foreign and name in arguments:
            raise AmqpError(406, f"invalid arg '{name}' for {where} of queue type {_MODULES[kind]}")
        reason = None if value is None or name in foreign else _CHECKS[name](value)
        if name == "x-dead-letter-routing-key" and value is not None and dlx is None:
            reason = reason or "routing_key_but_no_dlx_defined"
        if reason is not None:
            raise AmqpError(406, f"invalid arg '{name}' for {where}: {reason}")


def check_replicated_flags(
    where: str, *, durable: bool, exclusive: bool, auto_delete: bool
) -> None:
    """Raise 406 for the first flag that quorum queues and streams cannot have."""
    flags = {"auto-delete": auto_delete, "exclusive-owner": exclusive, "non-durable": not durable}
    for name, is_wrong in flags.items():
        if is_wrong:
            raise AmqpError(406, f"invalid property '{name}' for {where}")


def _count(value: object) -> str | None:
    if not isinstance(value, int) or not is_integer(value):
        return f'"expected integer, got {field_type(value)}"'
    return f"{{value_negative,{value}}}" if value < 0 else None


def _at_most(limit: int, reason: str) -> Check:
    def check(value: object) -> str | None:
        is_too_large = isinstance(value, int) and value > limit
        return _count(value) or (f"{{{reason},{value}}}" if is_too_large else None)

    return check


def _not_zero(check: Check) -> Check:
    return lambda value: "{value_zero,0}" if value == 0 and is_integer(value) else check(value)


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else f"{{unacceptable_type,{field_type(value)}}}"


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else f"{{unacceptable_type,{field_type(value)}}}"


def _one_of(allowed: Collection[object], reason: str, check: Check = _text) -> Check:
    """Check the type, then the value; the reason may name the value."""
    return lambda value: check(value) or (None if value in allowed else reason.format(value))


def _age(value: object) -> str | None:
    if not isinstance(value, str):
        return _text(value)
    return "invalid_max_age" if seconds_of(value) is None else None


def seconds_of(age: str) -> int | None:
    """Return the seconds of an age such as `7D`; None if the unit is unknown, or the number is 0.

    Raises:
        AmqpError: 541 if it does not begin with a number.
    """
    found = _AGE.fullmatch(age)
    if found is None:
        raise crashed()
    return int(found[1]) * _UNITS_S.get(found[2], 0) or None


_duration = _at_most(TTL_MAX_MS, "value_too_large")
_CHECKS: dict[str, Check] = {
    "x-queue-type": _one_of(_MODULES, "\"unsupported queue type '{}'\""),
    "x-expires": _not_zero(_duration),
    "x-message-ttl": _duration,
    "x-dead-letter-routing-key": _text,
    "x-max-length": _count,
    "x-max-length-bytes": _count,
    "x-max-priority": _at_most(255, "max_value_exceeded"),
    "x-overflow": _one_of(
        ("drop-head", "reject-publish", "reject-publish-dlx"), "invalid_overflow"
    ),
    "x-queue-mode": _one_of(("default", "lazy"), "\"unsupported queue mode '{}'\""),
    "x-queue-version": _one_of((1, 2), "\"unsupported queue version '{}'\"", _count),
    "x-single-active-consumer": _flag,
    "x-dead-letter-strategy": _one_of(("at-most-once", "at-least-once"), "invalid_dlx_strategy"),
    "x-max-in-memory-length": _count,
    "x-max-in-memory-bytes": _count,
    "x-quorum-initial-group-size": _not_zero(_count),
    "x-queue-leader-locator": _one_of(
        ("client-local", "balanced", "random", "least-leaders"), "invalid_queue_locator_arg"
    ),
    "x-max-age": _age,
    "x-initial-cluster-size": _not_zero(_count),
    "x-stream-max-segment-size-bytes": _count,
}
"""Checks by argument, in RabbitMQ's order."""

_NOT_OF = {
    "classic": (
        *("x-dead-letter-strategy", "x-delivery-limit", "x-initial-cluster-size", "x-max-age"),
        *("x-max-in-memory-bytes", "x-max-in-memory-length", "x-queue-leader-locator"),
        *("x-quorum-initial-group-size", "x-stream-max-segment-size-bytes"),
    ),
    "quorum": (
        *("x-initial-cluster-size", "x-max-age", "x-max-priority", "x-queue-master-locator"),
        *("x-queue-mode", "x-queue-version", "x-stream-max-segment-size-bytes"),
    ),
    "stream": (
        *("x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy"),
        *("x-delivery-limit", "x-expires", "x-max-in-memory-bytes", "x-max-in-memory-length"),
        *("x-max-length", "x-max-priority", "x-message-ttl", "x-overflow"),
        *("x-queue-master-locator", "x-queue-mode", "x-queue-version"),
        *("x-quorum-initial-group-size", "x-single-active-consumer"),
    ),
}
"""Arguments that a queue of the type cannot have."""

COMPARED = (
    *("x-expires", "x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key"),
    *("x-max-length", "x-max-length-bytes", "x-max-priority", "x-overflow", "x-queue-mode"),
    *("x-queue-version", "x-single-active-consumer", "x-queue-type", "x-queue-master-locator"),
    *("x-delivery-limit", "x-dead-letter-strategy", "x-max-in-memory-length"),
    *("x-max-in-memory-bytes", "x-queue-leader-locator", "x-quorum-initial-group-size"),
    *("x-max-age", "x-initial-cluster-size", "x-stream-max-segment-size-bytes"),
)
"""Arguments that must be equal in a second declaration; others are not compared."""
