"""Ways into a transaction of the application, side by side with a bare insert of the same rows.

It knows an outbox, and the application's connection as something that commits. It must never know
which database that is.
"""

from collections.abc import Callable
from typing import Any

from reliablepub import Message, Outbox
from tests.speed.measuring import Results, Way, in_rounds, print_table
from tests.speed.peers import BODY

BARE, EACH, MANY = "a bare `INSERT`", "`enqueue`", "`enqueue_many`"


def in_transactions(
    outbox: Outbox,
    db: Any,
    bare: Callable[[], None],  # stores as many rows
    *,
    at_once: int,
    count: int,
    rounds: int,
) -> Results:
    """Store so many messages at once on an application's connection, and commit, in three ways."""
    messages = [Message(BODY, routing_key="orders")] * at_once

    def each() -> None:
        for message in messages:
            outbox.enqueue(message, connection=db)

    def many() -> None:
        outbox.enqueue_many(messages, connection=db)

    def committed(work: Callable[[], None]) -> Way:
        def run(count: int) -> None:
            for _ in range(count // at_once):
                work()
                db.commit()

        return Way(run)

    ways = {name: committed(work) for name, work in ((BARE, bare), (EACH, each), (MANY, many))}
    results = in_rounds(ways, count, rounds, lambda: None)
    print_table(
        (f"messages a transaction: {at_once}", "µs a message", "CPU time", "of the bare one"),
        [
            (
                name,
                f"{1e6 / results[name].per_second:.1f}",
                f"{results[name].cpu_us:.0f} µs",
                f"{results.cpu_ratio(name, BARE):.1f}",
            )
            for name in results
        ],
    )
    return results
