"""The result of a run of ``reliablepub publish``: exit code, error lines and figures.

Knows: how a run ended, and what the user should do about it. Must never know: how the run worked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from reliablepub.cli.commands import Exit
from reliablepub.cli.link import spoken
from reliablepub.cli.output import count_of, same_outbox
from reliablepub.cli.publish.run import ENDS, Stopped, Tally
from reliablepub.printable import one_line
from reliablepub.relay.status import Link, Status

_WHY: Final[dict[Stopped | None, str]] = {
    Stopped.INTERRUPTED: "interrupted",
    Stopped.REFUSED: "stopped early",
}
"""Why messages are open although the broker is connected."""
_TOLD: Final = ("exchange", "routing_key", "reply_code", "reply_text")
"""Of each failure."""
_COUNTED: Final = ("stored", "open", "confirmed", "parked", "expired", "discarded")
"""Of the outbox."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run."""

    source: str  # the file, or ``-``
    outbox: str | None
    records: int  # in the file; for a stream, of those read
    # Number of the record at which this run resumed an earlier one: the exit code speaks for the
    # earlier run's messages too
    resumed_at: int | None
    tally: Tally
    status: Status  # after the publisher was closed
    last_link: Status  # before it was closed
    stopped: Stopped | None  # why the run ended early
    error: str  # that ended the run, in one line
    seconds: float
    is_all_read: bool = False  # and stored
    is_stream: bool = False  # can be read only once, such as stdin or a named pipe

    @property
    def open(self) -> int:
        """Messages without a final outcome, including those of a resumed run.

        A run that nothing stopped has waited for all but messages whose time has not come.
        """
        has_earlier = self.resumed_at is not None and self.stopped is not None
        return self.status.open if has_earlier else self.tally.open

    @property
    def parked_before(self) -> int:
        """Parked and expired messages in the outbox that may be those of the resumed run.

        A relay, or the earlier run itself, may have given them up before this run began.
        """
        if self.resumed_at is None:
            return 0
        counters = self.status.counters
        return max(0, counters.parked + counters.expired - self.tally.parked)

    @property
    def is_unfinished(self) -> bool:
        """Whether records were, or may have been, left to store."""
        if self.is_all_read or self.stopped not in (Stopped.INTERRUPTED, Stopped.TIMEOUT):
            return False
        return self.is_stream or self._stored_upto() < self.records

    @property
    def exit(self) -> Exit:
        """The exit code; `reliablepub.cli.commands` defines the precedence."""
        if self.stopped is Stopped.OUTBOX:
            return Exit.OUTBOX
        if self.stopped is Stopped.BAD_INPUT:
            return Exit.BAD_INPUT
        if self.tally.parked or self.parked_before or self.stopped is Stopped.REFUSED:
            return Exit.PARKED
        if self.open or self.is_unfinished:
            return Exit.OPEN
        return Exit.CONFIRMED

    @property
    def rate(self) -> float:
        """Confirmed messages per second."""
        return self.tally.confirmed / self.seconds if self.seconds > 0 else 0.0

    @property
    def reason(self) -> str:
        """Why the connection keeps messages open; empty when it is connected."""
        link = self.last_link
        if link.link is Link.CONNECTED:
            return ""
        if link.link is Link.BLOCKED:
            return f"blocked by the broker: {spoken(link.reason)}"
        return spoken(link.reason) or "no connection was made yet"

    def problems(self) -> list[str]:
        """Error lines for stderr, the most important first; empty if all went well."""
        lines = [self.error] if self.error else []
        if self.stopped is Stopped.BAD_INPUT:
            before = count_of(self.tally.stored, "record")
            are = "is" if self.tally.stored == 1 else "are"
            lines[0] += f"; {before} before it {are} {self._words()[0]}"
        if self.tally.parked:
            lines.append(self._parked())
        if self.parked_before:
            lines.append(self._parked_before())
        if self.open:
            lines.append(self._still_open())
        if self.is_unfinished:
            word = "interrupted" if self.stopped is Stopped.INTERRUPTED else "gave up"
            lines.append(f"{word} after {self._so_far()}; {self._go_on()}")
        return [one_line(line) for line in lines]

    def headline(self) -> str:
        """The figures in one line of text."""
        tally = self.tally
        resumed = f", resumed at {self.resumed_at}" if self.resumed_at is not None else ""
        stored, parked = self._words()
        return (
            f"{self.source}: {count_of(self.records, 'record')}{resumed}, {tally.stored} {stored}, "
            f"{tally.confirmed} confirmed, {tally.parked} {parked}, {tally.open} open "
            f"in {self.seconds:.1f} s ({self.rate:.0f} confirmed per second)"
        )

    def as_json(self) -> dict[str, Any]:
        """The result as the JSON object that docs/cli.md documents."""
        tally = self.tally
        return {
            "source": self.source,
            "records": self.records,
            "resumed_at": self.resumed_at,
            "stored": tally.stored,
            "confirmed": tally.confirmed,
            "parked": tally.parked,
            "open": tally.open,
            "seconds": round(self.seconds, 3),
            "rate": round(self.rate, 1),
            "link": self.last_link.link.value,
            "reason": self.reason,
            "stopped": self.stopped.value if self.stopped is not None else None,
            "problems": self.problems(),
            "exit_code": int(self.exit),
            "outcomes": {end: tally.given_up[end] for end in sorted(ENDS.values())},
            "failures": [
                {"message_id": failure.message_id, "outcome": end}
                | {name: getattr(failure, name) for name in _TOLD}
                for end, failure in tally.failures
            ],
            "outbox": self._ledger(),
        }

    # ------------------------------------------------------------------ inside

    def _words(self) -> tuple[str, str]:
        """What has become of messages: without an outbox, none is stored or parked."""
        return ("stored", "parked") if self.outbox is not None else ("accepted", "given up")

    def _ledger(self) -> dict[str, Any] | None:
        if self.outbox is None:
            return None
        counters = self.status.counters
        return {"path": self.outbox} | {name: getattr(counters, name) for name in _COUNTED}

    def _so_far(self) -> str:
        return f"record {self._stored_upto()} of {self.records}"

    def _stored_upto(self) -> int:
        return (self.resumed_at or 1) - 1 + self.tally.stored

    def _go_on(self) -> str:
        if self.outbox is None or self.is_stream:
            return "the records after it were not published"
        return "the same command resumes there"

    def _parked(self) -> str:
        tally = self.tally
        _, first = tally.failures[0]
        said = f"{first.reply_code} {first.reply_text}" if first.reply_code else first.reply_text
        if self.stopped is Stopped.REFUSED:
            stored, parked = self._words()
            line = (
                f"the broker refuses these messages ({said}); stopped reading after "
                f"{self._so_far()}: {tally.stored} {stored}, {tally.parked} {parked}, "
                f"{tally.open} open"
            )
        else:
            ends = ", ".join(f"{count} {end}" for end, count in sorted(tally.given_up.items()))
            line = (
                f"{count_of(tally.parked, 'message')} given up ({ends}); the first is message "
                f"{first.message_id} to exchange {first.exchange!r} with routing key "
                f"{first.routing_key!r}: {said}"
            )
        if self.outbox is None:
            return f"{line}; without an outbox nothing keeps what was given up"
        return f"{line}; see `reliablepub outbox list --state parked {same_outbox(self.outbox)}`"

    def _parked_before(self) -> str:
        are = "is" if self.parked_before == 1 else "are"
        listed = "outbox list --state parked --state expired"
        return (
            f"{count_of(self.parked_before, 'message')} in the outbox {are} parked or expired, and "
            f"may be of the earlier run; see `reliablepub {listed} {same_outbox(self.outbox)}`"
        )

    def _still_open(self) -> str:
        open_ = count_of(self.open, "message")
        are = "is" if self.open == 1 else "are"
        why = self.reason or _WHY.get(self.stopped, "the broker has not confirmed them in time")
        if self.stopped is Stopped.NOT_DUE:  # applies whatever the state of the connection
            why = "they are not due yet"
        if self.outbox is None:
            return (
                f"{open_} {are} not confirmed ({why}), and there is no outbox to keep them: "
                "publish them again"
            )
        return (
            f"{open_} {are} stored, not yet published ({why}); "
            f"run `reliablepub relay {same_outbox(self.outbox)} --url ...`"
        )
