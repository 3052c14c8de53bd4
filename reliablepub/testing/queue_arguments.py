"""The arguments of queue.declare: which values RabbitMQ accepts, and its reply texts.

PURE: this module must never know what an argument does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reliablepub.testing.field_types import field_type, is_integer
from reliablepub.testing.replies import AmqpError

if TYPE_CHECKING:
    from collections.abc import Callable

TTL_MAX_MS = 315_360_000_000
"""Ten years."""

_PRIORITY_MAX = 255
_OVERFLOWS = ("drop-head", "reject-publish", "reject-publish-dlx")
_QUEUE_MODES = ("default", "lazy")
_QUEUE_VERSIONS = (1, 2)


def check_queue_arguments(arguments: dict[str, Any], where: str) -> None:
    """Raise 406 for the first argument with a wrong value; unknown arguments are accepted."""
    dlx = arguments.get("x-dead-letter-exchange")
    if dlx is not None and not isinstance(dlx, str):
        kind = f"invalid type '{field_type(dlx)}' for arg 'x-dead-letter-exchange' in {where}"
        raise AmqpError(406, kind)
    for name, reason_against in _CHECKS.items():
        value = arguments.get(name)
        reason = None if value is None else reason_against(value)
        if name == "x-dead-letter-routing-key" and value is not None and dlx is None:
            reason = reason or "routing_key_but_no_dlx_defined"
        if reason is not None:
            raise AmqpError(406, f"invalid arg '{name}' for {where}: {reason}")
    for name in _OF_OTHER_TYPES:
        if name in arguments:
            kind = "of queue type rabbit_classic_queue"
            raise AmqpError(406, f"invalid arg '{name}' for {where} {kind}")


def _count(value: object) -> str | None:
    if not isinstance(value, int) or not is_integer(value):
        return f'"expected integer, got {field_type(value)}"'
    return f"{{value_negative,{value}}}" if value < 0 else None


def _duration(value: object) -> str | None:
    too_large = isinstance(value, int) and value > TTL_MAX_MS
    return _count(value) or (f"{{value_too_large,{value}}}" if too_large else None)


def _expiry(value: object) -> str | None:
    return "{value_zero,0}" if value == 0 and is_integer(value) else _duration(value)


def _priority(value: object) -> str | None:
    too_large = isinstance(value, int) and value > _PRIORITY_MAX
    return _count(value) or (f"{{max_value_exceeded,{value}}}" if too_large else None)


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else f"{{unacceptable_type,{field_type(value)}}}"


def _overflow(value: object) -> str | None:
    return _text(value) or (None if value in _OVERFLOWS else "invalid_overflow")


def _mode(value: object) -> str | None:
    return _text(value) or (
        None if value in _QUEUE_MODES else f"\"unsupported queue mode '{value}'\""
    )


def _version(value: object) -> str | None:
    return _count(value) or (
        None if value in _QUEUE_VERSIONS else f"\"unsupported queue version '{value}'\""
    )


def _type(value: object) -> str | None:
    return _text(value) or (None if value == "classic" else f"\"unsupported queue type '{value}'\"")


def _flag(value: object) -> str | None:
    return None if isinstance(value, bool) else f"{{unacceptable_type,{field_type(value)}}}"


_CHECKS: dict[str, Callable[[object], str | None]] = {
    "x-queue-type": _type,
    "x-expires": _expiry,
    "x-message-ttl": _duration,
    "x-dead-letter-routing-key": _text,
    "x-max-length": _count,
    "x-max-length-bytes": _count,
    "x-max-priority": _priority,
    "x-overflow": _overflow,
    "x-queue-mode": _mode,
    "x-queue-version": _version,
    "x-single-active-consumer": _flag,
}
"""Checks by argument, in RabbitMQ's order."""

_OF_OTHER_TYPES = (
    "x-dead-letter-strategy",
    "x-delivery-limit",
    "x-initial-cluster-size",
    "x-max-age",
    "x-max-in-memory-bytes",
    "x-max-in-memory-length",
    "x-queue-leader-locator",
    "x-quorum-initial-group-size",
    "x-stream-max-segment-size-bytes",
)

COMPARED = (
    "x-expires",
    "x-message-ttl",
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    "x-max-length",
    "x-max-length-bytes",
    "x-max-priority",
    "x-overflow",
    "x-queue-mode",
    "x-queue-version",
    "x-single-active-consumer",
    "x-queue-type",
    "x-queue-master-locator",
)
"""Arguments that must be equal in a second declaration; others are not compared."""
