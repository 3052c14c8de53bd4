"""Every metric there is: its name, its type, and what it means.

Knows: names. Must never know: where a value comes from, or any client library. The documentation,
the alert rules and the dashboard are held equal to this table by tests.

Names follow Prometheus: the prefix of the application, base units, ``_total`` for what only grows.
There are few labels: ``outbox`` on each, and outcomes. Exchanges and routing keys are none, on
purpose: each value of a label is a time series of its own, for as long as the server keeps them,
and a routing key may well hold an order number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OUTBOX_LABEL: Final = "outbox"
"""On every metric: the name that was given to `Metrics`."""

LATENCY_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""From a queue in memory to the default deadline of a confirm."""


class Type(StrEnum):
    """Of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is exposed.
        type: what it does over time.
        means: in a sentence, for people.
        label: besides `OUTBOX_LABEL`; empty for none.
        values: that the label may have; all of them are there from the start.
    """

    name: str
    type: Type
    means: str
    label: str = ""
    values: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries may use."""
        if self.type is Type.HISTOGRAM:
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (self.name,)


OUTCOMES: Final = ("confirmed", "returned", "nacked", "refused", "uncertain")
ENDINGS: Final = ("parked", "expired", "discarded")

EVENT_METRICS: Final = (
    Metric(
        "reliablepub_stored_messages_total",
        Type.COUNTER,
        "Messages that this publisher has accepted.",
    ),
    Metric(
        "reliablepub_sent_attempts_total",
        Type.COUNTER,
        "Messages written to the wire, each as often as it was.",
    ),
    Metric(
        "reliablepub_ended_attempts_total",
        Type.COUNTER,
        "Attempts that have ended, by outcome.",
        "outcome",
        OUTCOMES,
    ),
    Metric(
        "reliablepub_given_up_messages_total",
        Type.COUNTER,
        "Messages that the relay has given up, by what became of them.",
        "ending",
        ENDINGS,
    ),
    Metric(
        "reliablepub_confirm_latency_seconds",
        Type.HISTOGRAM,
        "Time from writing a message to its confirm.",
    ),
    Metric(
        "reliablepub_blocked_seconds_total",
        Type.COUNTER,
        "Time for which the broker took no publishes (connection.blocked).",
    ),
)
"""Counted by the publisher that tells of them, since this process began."""

STATUS_METRICS: Final = (
    Metric(
        "reliablepub_connected",
        Type.GAUGE,
        "1 while there is a connection to the broker, else 0.",
    ),
    Metric(
        "reliablepub_blocked",
        Type.GAUGE,
        "1 while the broker takes no publishes, else 0.",
    ),
    Metric(
        "reliablepub_connections_total",
        Type.COUNTER,
        "Connections made; all but the first are reconnects.",
    ),
    Metric(
        "reliablepub_in_flight_messages",
        Type.GAUGE,
        "Messages written and not settled.",
    ),
    Metric(
        "reliablepub_window_messages",
        Type.GAUGE,
        "Most messages that may be in flight for now.",
    ),
    Metric(
        "reliablepub_buffered_messages",
        Type.GAUGE,
        "Messages in memory, waiting for the window.",
    ),
    Metric(
        "reliablepub_aside_messages",
        Type.GAUGE,
        "Messages set aside: connections were lost over them without blame.",
    ),
    Metric(
        "reliablepub_paused_destinations",
        Type.GAUGE,
        "Destinations to which nothing is sent for now, because they refuse (Breaker).",
    ),
    Metric(
        "reliablepub_paused_messages",
        Type.GAUGE,
        "Messages that wait for these, of the 100 that were paused first.",
    ),
    Metric(
        "reliablepub_contradictions_total",
        Type.COUNTER,
        "Confirms and returns of the broker that made no sense.",
    ),
    Metric(
        "reliablepub_stale_events_total",
        Type.COUNTER,
        "Events of channels that were over; they change nothing.",
    ),
    Metric(
        "reliablepub_callback_errors_total",
        Type.COUNTER,
        "How often a hook or another callback of the application has raised.",
    ),
    Metric(
        "reliablepub_relay_turns_total",
        Type.COUNTER,
        "Turns of the relay; an idle one takes some every second.",
    ),
)
"""Of a publisher's `Status` at the time of the scrape; the states only while it is open."""

LEDGER_METRICS: Final = (
    Metric(
        "reliablepub_open_messages",
        Type.GAUGE,
        "Messages accepted and not settled.",
    ),
    Metric(
        "reliablepub_parked_messages",
        Type.GAUGE,
        "Messages given up and kept for a person.",
    ),
    Metric(
        "reliablepub_expired_messages",
        Type.GAUGE,
        "Messages whose own deadline passed first, kept too.",
    ),
    Metric(
        "reliablepub_ledger_stored_messages_total",
        Type.COUNTER,
        "Messages ever accepted, by anybody.",
    ),
    Metric(
        "reliablepub_ledger_confirmed_messages_total",
        Type.COUNTER,
        "Messages ever confirmed, by any relay.",
    ),
    Metric(
        "reliablepub_ledger_discarded_messages_total",
        Type.COUNTER,
        "Messages ever thrown away, by a person or the policy.",
    ),
)
"""The ledger: of the file where there is one, and so of everybody who uses it; else of memory."""

OUTBOX_METRICS: Final = (
    Metric(
        "reliablepub_outbox_readable",
        Type.GAUGE,
        "1 if the outbox could be read for this scrape, else 0.",
    ),
    Metric(
        "reliablepub_outbox_relayed",
        Type.GAUGE,
        "1 while a process relays the outbox, else 0.",
    ),
    Metric(
        "reliablepub_oldest_open_age_seconds",
        Type.GAUGE,
        "Age of the open message that was stored first; 0 without one.",
    ),
    Metric(
        "reliablepub_waiting_messages",
        Type.GAUGE,
        "Open messages that wait for a time to be sent, or sent again.",
    ),
    Metric(
        "reliablepub_held_ordering_keys",
        Type.GAUGE,
        "Ordering keys that a parked message holds.",
    ),
    Metric(
        "reliablepub_outbox_size_bytes",
        Type.GAUGE,
        "The database and its write-ahead log.",
    ),
    Metric(
        "reliablepub_outbox_log_size_bytes",
        Type.GAUGE,
        "Of these, the log; it grows while a read transaction stays open.",
    ),
    Metric(
        "reliablepub_outbox_disk_full",
        Type.GAUGE,
        "1 while the disk is too full for a new message, else 0.",
    ),
    Metric(
        "reliablepub_outbox_disk_free_bytes",
        Type.GAUGE,
        "Free on the disk below it.",
    ),
)
"""Of the file, read at the time of the scrape; only where `Metrics` was told of one."""

CATALOGUE: Final = (*EVENT_METRICS, *STATUS_METRICS, *LEDGER_METRICS, *OUTBOX_METRICS)
