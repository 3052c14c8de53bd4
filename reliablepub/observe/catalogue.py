"""The catalogue of all metrics: name, type and meaning.

Knows: names. Must never know: where a value comes from, or any client library. Tests hold the
documentation, the alert rules and the dashboard equal to this table.

Names follow Prometheus' conventions: application prefix, base units, ``_total`` for counters. Every
metric has the label ``outbox``; some have one more, for an outcome, an ending, a reason or a
version. Exchanges and routing keys are no labels: each value of a label makes a time series, which
the server keeps, and a routing key may contain an order number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

OUTBOX_LABEL: Final = "outbox"
"""Label of every metric; its value is the name given to `Metrics`."""

LATENCY_BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Bounds in seconds, from a queue in memory to the default confirm timeout."""


class Type(StrEnum):
    """Type of a metric, as Prometheus names it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    type: Type
    means: str  # one sentence; the help text
    label: str = ""  # besides `OUTBOX_LABEL`
    values: tuple[str, ...] = ()  # each is exposed from the start; empty if any text can be one

    @property
    def series(self) -> tuple[str, ...]:
        """Names of the time series, as used in queries."""
        if self.type is Type.HISTOGRAM:
            return tuple(f"{self.name}_{end}" for end in ("bucket", "count", "sum"))
        return (self.name,)


DELIVERY_BUCKETS_S: Final = (
    *(0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3_600.0, 21_600.0),
)
"""Bounds in seconds, from a broker beside the relay to an outage of hours."""

REASONS: Final = (
    *("full", "disk_full", "disk_failed", "unsure", "locked", "unreachable"),
    *("closed", "held_up", "other"),
)
"""Why messages are not accepted, by the error that the caller gets."""

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
        "Attempts handed to the client library: messages, counted once for each attempt.",
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
        "Messages that the relay has given up: parked, expired or discarded.",
        "ending",
        ENDINGS,
    ),
    Metric(
        "reliablepub_confirm_latency_seconds",
        Type.HISTOGRAM,
        "Time from writing a message to its confirm.",
    ),
    Metric(
        "reliablepub_delivery_seconds",
        Type.HISTOGRAM,
        "Time from storing a message to its confirm, all attempts and waits included.",
    ),
    Metric(
        "reliablepub_blocked_seconds_total",
        Type.COUNTER,
        "Time for which the broker accepted no publishes (connection.blocked).",
    ),
)
"""Counted from the events of this process's publisher, since the process began."""

STATUS_METRICS: Final = (
    Metric(
        "reliablepub_connected", Type.GAUGE, "1 while there is a connection to the broker, else 0."
    ),
    Metric("reliablepub_blocked", Type.GAUGE, "1 while the broker accepts no publishes, else 0."),
    Metric(
        "reliablepub_connections_total",
        Type.COUNTER,
        "Connections made; all but the first are reconnects.",
    ),
    Metric("reliablepub_in_flight_messages", Type.GAUGE, "Messages written and not settled."),
    Metric("reliablepub_window_messages", Type.GAUGE, "Current limit of messages in flight."),
    Metric(
        "reliablepub_buffered_messages", Type.GAUGE, "Messages in memory, waiting for the window."
    ),
    Metric(
        "reliablepub_aside_messages",
        Type.GAUGE,
        "Messages set aside: connections were lost while they were alone in flight.",
    ),
    Metric(
        "reliablepub_paused_destinations",
        Type.GAUGE,
        "Destinations that are paused because they refuse messages (Breaker).",
    ),
    Metric(
        "reliablepub_give_up_timestamp_seconds",
        Type.GAUGE,
        "When the first messages for a paused destination are given up (seconds since 1970), or 0.",
    ),
    Metric(
        "reliablepub_certificate_expiry_timestamp_seconds",
        Type.GAUGE,
        "When the client certificate expires, in seconds since 1970 (CertificateFiles only).",
    ),
    Metric(
        "reliablepub_paused_messages",
        Type.GAUGE,
        "Messages that wait for paused destinations (of the 100 that were paused first).",
    ),
    Metric(
        "reliablepub_contradictions_total",
        Type.COUNTER,
        "Confirms and returns of the broker that match no publish in flight.",
    ),
    Metric(
        "reliablepub_stale_events_total",
        Type.COUNTER,
        "Events of channels that had ended; they were ignored.",
    ),
    Metric(
        "reliablepub_callback_errors_total",
        Type.COUNTER,
        "Exceptions raised by hooks and other callbacks of the application.",
    ),
    Metric(
        "reliablepub_relay_turns_total",
        Type.COUNTER,
        "Turns of the relay; an idle relay takes at least two per second.",
    ),
    Metric(
        "reliablepub_last_turn_age_seconds",
        Type.GAUGE,
        "Time since the relay's last turn began; it grows while the relay hangs.",
    ),
    Metric("reliablepub_commits_total", Type.COUNTER, "Commits of the relay to the outbox."),
    Metric(
        "reliablepub_commit_seconds_total",
        Type.COUNTER,
        "Time spent in commits, waits for the lock included.",
    ),
    Metric(
        "reliablepub_lock_wait_seconds_total",
        Type.COUNTER,
        "Time for which the relay waited for SQLite's lock, which other writers held.",
    ),
    Metric("reliablepub_open_bytes", Type.GAUGE, "Size of the open messages, as limits count it."),
    Metric(
        "reliablepub_open_messages_limit",
        Type.GAUGE,
        "Most open messages (open_messages_max); +Inf without a limit.",
    ),
    Metric(
        "reliablepub_open_bytes_limit",
        Type.GAUGE,
        "Largest size of the open messages (open_bytes_max); +Inf without a limit.",
    ),
)
"""Read from the publisher's `Status` at the scrape; gauges only while the publisher is open."""

LEDGER_METRICS: Final = (
    Metric("reliablepub_open_messages", Type.GAUGE, "Messages accepted and not settled."),
    Metric(
        "reliablepub_parked_messages", Type.GAUGE, "Messages given up and kept for an operator."
    ),
    Metric(
        "reliablepub_expired_messages",
        Type.GAUGE,
        "Messages whose deadline passed before they were confirmed, kept for an operator.",
    ),
    Metric(
        "reliablepub_ledger_stored_messages_total",
        Type.COUNTER,
        "Messages ever accepted, by any process.",
    ),
    Metric(
        "reliablepub_ledger_confirmed_messages_total",
        Type.COUNTER,
        "Messages ever confirmed, by any relay.",
    ),
    Metric(
        "reliablepub_ledger_discarded_messages_total",
        Type.COUNTER,
        "Messages ever discarded, by an operator or by the retry policy.",
    ),
)
"""The ledger: of the outbox file, which all processes share, or of memory if there is no file."""

OUTBOX_METRICS: Final = (
    Metric(
        "reliablepub_outbox_readable",
        Type.GAUGE,
        "1 if the outbox could be read for this scrape, else 0.",
    ),
    Metric(
        "reliablepub_outbox_relayed",
        Type.GAUGE,
        "1 while the outbox, or each of its shards, has a relay, else 0.",
    ),
    Metric(
        "reliablepub_oldest_open_age_seconds",
        Type.GAUGE,
        "Age of the oldest open message whose row is not damaged; 0 if there is none.",
    ),
    Metric(
        "reliablepub_waiting_messages",
        Type.GAUGE,
        "Open messages that wait until they are due: delayed messages and retries.",
    ),
    Metric(
        "reliablepub_held_ordering_keys",
        Type.GAUGE,
        "Ordering keys that are held by a parked message.",
    ),
    Metric(
        "reliablepub_outbox_size_bytes", Type.GAUGE, "Size of the database and its write-ahead log."
    ),
    Metric(
        "reliablepub_outbox_log_size_bytes",
        Type.GAUGE,
        "Size of the write-ahead log; it grows while a read transaction stays open.",
    ),
    Metric(
        "reliablepub_outbox_disk_full",
        Type.GAUGE,
        "1 while the disk is too full for a new message, else 0.",
    ),
    Metric(
        "reliablepub_outbox_disk_free_bytes", Type.GAUGE, "Free space on the disk of the outbox."
    ),
    Metric("reliablepub_outbox_disk_size_bytes", Type.GAUGE, "Size of the disk of the outbox."),
)
"""Read from the outbox file at the scrape. Only if `Metrics` was given an outbox."""

PROCESS_METRICS: Final = (
    Metric(
        "reliablepub_build_info",
        Type.GAUGE,
        "1; exposed by each process that has metrics of the outbox.",
        "version",
    ),
    Metric(
        "reliablepub_rejected_messages_total",
        Type.COUNTER,
        "Messages that were not accepted, so that the caller got an error, by reason.",
        "reason",
        REASONS,
    ),
)
"""Of this process, whether it has a publisher or only enqueues."""

CATALOGUE: Final = (
    *PROCESS_METRICS,
    *EVENT_METRICS,
    *STATUS_METRICS,
    *LEDGER_METRICS,
    *OUTBOX_METRICS,
)
