"""`Publisher.publish()` returns a receipt, and `receipt.result()` the outcome.

Each retry budget is one attempt, so that the first refusal is reported; uncertain messages are
sent again. Any number of publishes is in flight.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tenacity import stop_after_attempt, wait_none

from reliablepub import Nacked, Publisher, Receipt, Refused, Retries, RetryPolicy, Unroutable
from tests.clients.letters import (
    CONFIRM_TIMEOUT_S,
    CONFIRMED,
    NACKED,
    REFUSED,
    RETURNED,
    Letter,
    Tell,
)

DISTRIBUTION = "reliablepub"
ONCE = Retries(stop=stop_after_attempt(1), wait=wait_none())
POLICY = RetryPolicy(nacked=ONCE, returned=ONCE, refused=ONCE)


def publish_all(url: str, letters: Sequence[Letter], tell: Tell) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Publisher(
            url,
            outbox=Path(folder) / "outbox.db",
            confirm_timeout_s=CONFIRM_TIMEOUT_S,
            retry=POLICY,
        ) as publisher,
    ):
        receipts = [
            publisher.publish(
                letter.body,
                exchange=letter.exchange,
                routing_key=letter.name,
                message_id=letter.message_id,
            )
            for letter in letters
        ]
        for letter, receipt in zip(letters, receipts, strict=True):
            tell(letter, _verdict(receipt))


def _verdict(receipt: Receipt) -> str:
    try:
        receipt.result()
    except Unroutable:
        return RETURNED
    except Nacked:
        return NACKED
    except Refused:
        return REFUSED
    return CONFIRMED
