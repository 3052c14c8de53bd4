"""The arguments of queue.declare and basic.consume.

Knows: which values RabbitMQ accepts, and its reply texts. Must never know: what an argument does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
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


def queue_type(arguments: Mapping[str, Any]) -> str:
    """Return the type that the arguments name: `classic`, `quorum` or `stream`."""
    kind = arguments.get("x-queue-type", "classic") if arguments else "classic"
    return kind if kind in ("quorum", "stream") else "classic"


def check_server_named(arguments: Mapping[str, Any]) -> None:
    """Raise 406 for a queue without a name that must have one; 541 for an unknown type."""
    if arguments.get("x-queue-type", "classic") not in _MODULES:
        raise crashed()
    kind = queue_type(arguments)
    if kind != "classic":
        module = _MODULES[kind]
        raise AmqpError(406, f"Cannot declare a server-named queue for type {module}")


def check_queue_arguments(arguments: Mapping[str, Any], where: str) -> None:
    """Raise 406 for the first argument with a wrong value; unknown arguments are accepted."""
    check_exchange_argument(arguments, "x-dead-letter-exchange", where)
    _check_value(arguments, "x-queue-type", where)
    kind = queue_type(arguments)
    for name in _CHECKS:
        if name in COMPARED[kind]:
            _check_value(arguments, name, where)
    _check_foreign(arguments, _QUEUE_ARGUMENTS - set(COMPARED[kind]), where, kind)


def check_exchange_argument(arguments: Mapping[str, Any], name: str, where: str) -> None:
    """Raise 406 if an argument that names an exchange is no string (rabbit_misc:r_arg)."""
    if name in arguments and not isinstance(arguments[name], str):
        kind = field_type(arguments[name])
        raise AmqpError(406, f"invalid type '{kind}' for arg '{name}' in {where}")


def check_consumer_arguments(arguments: Mapping[str, Any], kind: str, where: str) -> None:
    """Raise 406 for the first argument of basic.consume that is wrong."""
    for name in ("x-priority", "x-cancel-on-ha-failover"):
        if name in _CONSUMER_ARGUMENTS[kind]:
            _check_value(arguments, name, where)
    known = set().union(*_CONSUMER_ARGUMENTS.values())
    _check_foreign(arguments, known - _CONSUMER_ARGUMENTS[kind], where, kind)


def _check_value(arguments: Mapping[str, Any], name: str, where: str) -> None:
    if name not in arguments:
        return
    reason = _CHECKS[name](arguments[name])
    if name == "x-dead-letter-routing-key" and "x-dead-letter-exchange" not in arguments:
        reason = reason or "routing_key_but_no_dlx_defined"
    if reason is not None:
        raise AmqpError(406, f"invalid arg '{name}' for {where}: {reason}")


def _check_foreign(
    arguments: Mapping[str, Any], foreign: Collection[str], where: str, kind: str
) -> None:
    for name in arguments:
        if name in foreign:
            raise AmqpError(406, f"invalid arg '{name}' for {where} of queue type {_MODULES[kind]}")


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


def _integer(value: object) -> str | None:
    return None if is_integer(value) else f'"expected integer, got {field_type(value)}"'


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
    "x-expires": _not_zero(_duration),
    "x-message-ttl": _duration,
    "x-dead-letter-routing-key": _text,
    "x-dead-letter-strategy": _one_of(("at-most-once", "at-least-once"), "invalid_dlx_strategy"),
    "x-max-length": _count,
    "x-max-length-bytes": _count,
    "x-max-in-memory-length": _count,
    "x-max-in-memory-bytes": _count,
    "x-max-priority": _at_most(255, "max_value_exceeded"),
    "x-overflow": _one_of(
        ("drop-head", "reject-publish", "reject-publish-dlx"), "invalid_overflow"
    ),
    "x-queue-mode": _one_of(("default", "lazy"), "\"unsupported queue mode '{}'\""),
    "x-queue-version": _one_of((1, 2), "\"unsupported queue version '{}'\"", _count),
    "x-single-active-consumer": _flag,
    "x-queue-type": _one_of(_MODULES, "\"unsupported queue type '{}'\""),
    "x-quorum-initial-group-size": _not_zero(_count),
    "x-max-age": _age,
    "x-stream-max-segment-size-bytes": _count,
    "x-initial-cluster-size": _not_zero(_count),
    "x-queue-leader-locator": _one_of(
        ("client-local", "balanced", "random", "least-leaders"), "invalid_queue_locator_arg"
    ),
    "x-priority": _integer,
    "x-cancel-on-ha-failover": _flag,
}
"""Checks by argument, in RabbitMQ's order."""

COMPARED = {
    "classic": (
        *("x-expires", "x-message-ttl", "x-dead-letter-exchange", "x-dead-letter-routing-key"),
        *("x-max-length", "x-max-length-bytes", "x-max-priority", "x-overflow", "x-queue-mode"),
        *("x-queue-version", "x-single-active-consumer", "x-queue-type", "x-queue-master-locator"),
    ),
    "quorum": (
        *("x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy"),
        *("x-expires", "x-max-length", "x-max-length-bytes", "x-max-in-memory-length"),
        *("x-max-in-memory-bytes", "x-overflow", "x-single-active-consumer", "x-queue-type"),
        *("x-quorum-initial-group-size", "x-delivery-limit", "x-message-ttl"),
        "x-queue-leader-locator",
    ),
    "stream": (
        *("x-max-length-bytes", "x-queue-type", "x-max-age", "x-stream-max-segment-size-bytes"),
        *("x-initial-cluster-size", "x-queue-leader-locator"),
    ),
}
"""The arguments of each queue type, in the order in which a second declaration is compared.

Others are not compared, and those of another type are refused in the first declaration.
"""

_QUEUE_ARGUMENTS = frozenset(name for names in COMPARED.values() for name in names)

_CONSUMER_ARGUMENTS: dict[str, frozenset[str]] = {
    "classic": frozenset({"x-cancel-on-ha-failover", "x-priority", "x-credit"}),
    "quorum": frozenset({"x-priority", "x-credit"}),
    "stream": frozenset({"x-stream-offset", "x-credit"}),
}
