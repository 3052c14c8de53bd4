"""Dead-lettering: where a dropped message goes, and the headers that are added to it.

Knows: rabbit_dead_letter: the `x-death` and `x-first-death-*` headers, the routing key, which
cycles are broken. Must never know: why a queue drops a message, consumers.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from reliablepub.testing.content_header import rewritten
from reliablepub.testing.fields import WireInt

if TYPE_CHECKING:
    from reliablepub.testing.history import Publish
    from reliablepub.testing.queues import Buried, Queue
    from reliablepub.testing.routing import VirtualHost


def died(buried: Buried, time_s: int) -> Publish:
    """Return the message that is published to the dead letter exchange.

    Args:
        buried: The message, the queue that dropped it, and the reason.
        time_s: Wall clock, seconds since 1970.
    """
    publish, queue = buried.publish, buried.queue
    key = queue.arguments.get("x-dead-letter-routing-key")
    headers = dict(publish.properties.headers or {})
    add: dict[str, Any] = {"x-death": _deaths(publish, buried, time_s)}
    if "x-death" not in headers:
        add |= {
            "x-first-death-exchange": publish.exchange,
            "x-first-death-queue": queue.name,
            "x-first-death-reason": buried.reason,
        }
    drop = () if key is None else ("CC",)
    header = rewritten(publish.header, drop=drop, add=add, keep_expiration=False)
    return dataclasses.replace(
        publish,
        exchange=queue.arguments["x-dead-letter-exchange"],
        routing_key=publish.routing_key if key is None else key,
        header=header,
        waiting=0,
        faults=(),
        blind_keys=publish.blind_keys if key is None else (),
    )


def destinations(vhost: VirtualHost, publish: Publish, reason: str) -> list[Queue]:
    """Return the queues that a dead letter reaches, except those that close an automatic cycle."""
    queues = vhost.route(publish)
    if reason == "rejected":  # a consumer decides each time, so the cycle is not automatic
        return queues
    deaths = _known_deaths(publish)
    return [queue for queue in queues if not _is_cycle(queue.name, deaths)]


def _deaths(publish: Publish, buried: Buried, time_s: int) -> list[dict[str, Any]]:
    """Return the `x-death` table: one entry per queue and reason, with a count, the latest first.

    RabbitMQ sorts the fields of an entry that it counts up or adds to others, not of the first.
    Each death reverses the other entries (rabbit_dead_letter:group_by_queue_and_reason).
    """
    deaths = _grouped(_known_deaths(publish))
    is_first = not isinstance((publish.properties.headers or {}).get("x-death"), list)
    same = [one for one in deaths if _place(one) == (buried.queue.name, buried.reason)]
    others = [one for one in deaths if _place(one) != (buried.queue.name, buried.reason)]
    if same:
        count = same[0].get("count")
        counted = WireInt(count + 1 if isinstance(count, int) else 1, "long")
        return [dict(sorted({**same[0], "count": counted}.items())), *others]
    copies = (publish.properties.headers or {}).get("CC")
    copied = (
        [one for one in copies if isinstance(one, str | bytes)] if isinstance(copies, list) else []
    )
    death: dict[str, Any] = {
        "count": WireInt(1, "long"),
        "reason": buried.reason,
        "queue": buried.queue.name,
        "time": datetime.fromtimestamp(time_s, UTC),
        "exchange": publish.exchange,
        "routing-keys": [publish.routing_key, *copied],
    }
    if publish.properties.expiration is not None:
        death["original-expiration"] = publish.properties.expiration
    return [death if is_first else dict(sorted(death.items())), *others]


def _grouped(deaths: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first entry of each queue and reason; two or more in the reverse order."""
    groups: dict[str, dict[str, Any]] = {}
    for death in deaths:
        groups.setdefault(repr(_place(death)), death)
    return list(groups.values())[::-1]


def _known_deaths(publish: Publish) -> list[dict[str, Any]]:
    known = (publish.properties.headers or {}).get("x-death")
    return [one for one in known if isinstance(one, dict)] if isinstance(known, list) else []


def _place(death: dict[str, Any]) -> tuple[Any, Any]:
    return death.get("queue"), death.get("reason")


def _is_cycle(name: str, deaths: list[dict[str, Any]]) -> bool:
    """Whether the message was in the queue before, and no consumer has rejected it since."""
    since: list[Any] = []
    for death in deaths:
        since.append(death.get("reason"))
        if death.get("queue") == name:
            return "rejected" not in since
    return False
