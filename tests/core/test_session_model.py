"""Sessions at a broker that does whatever brokers do, in any order: RELIABILITY's invariants hold.

The checks are in `naive_broker.Rig`; here is only what may happen.
"""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reliablepub._core.events import ConnectionClose
from reliablepub.outcome import OutcomeKind
from tests.core.naive_broker import CONFIRM_TIMEOUT_S, Rig

EXAMPLES: Final = 3 * settings().max_examples  # 300, or fewer where the profile says so
WINDOW_BYTES_MAX: Final = 100
FORCED: Final = ConnectionClose(320, "CONNECTION_FORCED - bye")
INTERNAL: Final = ConnectionClose(541, "INTERNAL_ERROR")
BAD = ["poison", "unfit", "unfit", "unroutable", "hard", "fatal", "deadly"]
KINDS = st.sampled_from(["good"] * 7 + BAD)


def has_channel(machine: SessionMachine) -> bool:
    """Whether the broker has one open."""
    return bool(machine.rig.broker.channels)


class SessionMachine(RuleBasedStateMachine):
    """Everything that may happen, one rule each."""

    @initialize(
        window_max=st.integers(1, 8),
        window_min=st.none() | st.integers(1, 2),
        limit=st.sampled_from(["", "", "has_one_channel", "has_one_number"]),
        places=st.integers(1, 3),
    )
    def start(self, window_max: int, window_min: int | None, limit: str, places: int) -> None:
        self.rig = Rig(
            window_max=window_max,
            window_min=window_min,
            window_bytes_max=WINDOW_BYTES_MAX,
            place_of=lambda key: key % places,
        )
        self.alarms = 0
        if limit:
            setattr(self.rig.broker, limit, True)
        self.rig.broker.connect()

    # the client

    @rule(kinds=st.lists(KINDS, min_size=1, max_size=8), size=st.integers(1, 120))
    def submit(self, kinds: list[str], size: int) -> None:
        for kind in kinds:
            self.rig.submit(size, kind=self._fit(kind))

    @rule(kind=KINDS, size=st.integers(1, 120))
    def submit_alone(self, kind: str, size: int) -> None:
        self.rig.submit(size, kind=self._fit(kind), is_alone=True)

    @rule(
        count=st.integers(2, 8),
        kind=st.sampled_from(["poison", "unfit", "hard", "fatal", "deadly"]),
        data=st.data(),
    )
    def run_into_poison(self, count: int, kind: str, data: st.DataObject) -> None:
        guilty = data.draw(st.integers(0, count - 1))
        self.rig.submit_many(count, guilty=[guilty], kind=self._fit(kind))
        self.rig.write()
        self.work(20)
        self.hear(20, at_once=False)

    @rule()
    def write(self) -> None:
        self.rig.write()

    @rule()
    def fail_to_write(self) -> None:
        self.rig.fail_to_write()

    @precondition(lambda self: self.rig.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        keys = st.sets(st.sampled_from(sorted(self.rig.waiting)), min_size=1)
        self.rig.withdraw(data.draw(keys))

    @rule(count=st.integers(1, 20), at_once=st.booleans())
    def hear(self, count: int, at_once: bool) -> None:  # noqa: FBT001
        if at_once:
            self.rig.hear(count)
            return
        for _ in range(count):
            self.rig.hear()

    @rule(seconds=st.sampled_from([0.1, 1.0, CONFIRM_TIMEOUT_S / 2, CONFIRM_TIMEOUT_S]))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)

    @rule()
    def report_what_leaves(self) -> None:
        self.rig.report_what_leaves()

    @rule(count=st.integers(1, 20))
    def go_well_for_a_while(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    # the broker

    @rule(count=st.integers(1, 20))
    def work(self, count: int) -> None:
        for _ in range(count):
            if self.rig.broker.inbox:  # the last thing may have ended the connection
                self.rig.broker.work()

    @precondition(has_channel)
    @rule(data=st.data(), multiple=st.booleans(), ack=st.booleans())
    def confirm(self, data: st.DataObject, multiple: bool, ack: bool) -> None:  # noqa: FBT001
        epoch = self._any_channel(data)
        unconfirmed = self.rig.broker.channels[epoch].unconfirmed
        if unconfirmed:
            tag = data.draw(st.sampled_from(unconfirmed))
            self.rig.broker.confirm(epoch, tag, multiple=multiple, ack=ack)

    @precondition(has_channel)
    @rule(data=st.data(), multiple=st.booleans(), ack=st.booleans())
    def confirm_without_a_tag(self, data: st.DataObject, multiple: bool, ack: bool) -> None:  # noqa: FBT001
        self.rig.broker.confirm(self._any_channel(data), 0, multiple=multiple, ack=ack)

    @precondition(has_channel)
    @rule(data=st.data())
    def lose_the_header_of_a_return(self, data: st.DataObject) -> None:
        self.rig.broker.channels[self._any_channel(data)].strips_headers = True
        self.rig.submit(kind="unroutable")
        self.rig.write()
        self.work(20)

    @precondition(has_channel)
    @rule(data=st.data())
    def return_what_was_never_sent(self, data: st.DataObject) -> None:
        self.rig.broker.return_what_was_never_sent(self._any_channel(data))

    @precondition(has_channel)
    @rule(data=st.data())
    def stop_confirming(self, data: st.DataObject) -> None:
        self.rig.broker.channels[self._any_channel(data)].is_mute = True

    @precondition(has_channel)
    @rule(data=st.data())
    def close_a_channel_for_no_fault_of_ours(self, data: st.DataObject) -> None:
        self.rig.broker.close_channel(self._any_channel(data), 320, by_publish=False)

    @precondition(has_channel)
    @rule(data=st.data())
    def confirm_what_was_never_sent(self, data: st.DataObject) -> None:
        self.rig.broker.confirm_what_was_never_sent(self._any_channel(data))

    @rule(index=st.integers(0, 1_000))
    def say_something_again(self, index: int) -> None:
        self.rig.broker.say_again(index)

    @precondition(lambda self: self.rig.broker.is_connected)
    @rule(close=st.sampled_from([FORCED, INTERNAL]))
    def close_the_connection_for_no_fault_of_ours(self, close: ConnectionClose) -> None:
        self.rig.broker.close_connection(close)

    @precondition(lambda self: self.rig.broker.is_connected)
    @rule(with_late_words=st.booleans())
    def drop(self, with_late_words: bool) -> None:  # noqa: FBT001
        self.rig.broker.drop(with_late_words=with_late_words)

    @precondition(lambda self: not self.rig.broker.is_connected)
    @rule(is_deaf_to_opening=st.booleans())
    def connect(self, is_deaf_to_opening: bool) -> None:  # noqa: FBT001
        self.rig.broker.is_deaf_to_opening = is_deaf_to_opening
        self.rig.broker.connect()

    @precondition(lambda self: self.rig.broker.is_connected)
    @rule()
    def block(self) -> None:
        self.rig.broker.block()

    @precondition(lambda self: self.rig.broker.is_connected)
    @rule()
    def unblock(self) -> None:
        self.rig.broker.unblock()

    @precondition(lambda self: not (self.alarms or self.rig.broker.unfit))
    @rule()
    def refuse_every_message(self) -> None:
        """Once: two states of the world that come and go look like one message's fault."""
        self.alarms += 1
        self.rig.broker.refuses_all = True

    @rule()
    def refuse_no_more(self) -> None:
        self.rig.broker.refuses_all = False

    # what must hold

    @invariant()
    def every_message_is_in_one_place(self) -> None:
        self.rig.check()

    def teardown(self) -> None:
        """In the end everyone gets well."""
        if not hasattr(self, "rig"):
            return
        broker = self.rig.broker
        broker.refuses_all = False
        for kind in (broker.deadly, broker.fatal, broker.hard, broker.unfit):
            kind.clear()  # what is not refused goes through some day
        self.rig.run_until_idle()
        for key, verdict in self.rig.settling.items():
            if key in broker.poison or verdict.kind is OutcomeKind.REFUSED:
                assert verdict.kind is OutcomeKind.REFUSED
            elif key in broker.unroutable:
                assert verdict.kind is OutcomeKind.RETURNED
            else:
                assert verdict.kind in {OutcomeKind.CONFIRMED, OutcomeKind.NACKED}

    def _fit(self, kind: str) -> str:
        """No message is unfit where all have been refused for a while: see the rule for that."""
        return "good" if kind == "unfit" and self.alarms else kind

    def _any_channel(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.rig.broker.channels)))


@pytest.mark.parametrize(
    "examples",
    [EXAMPLES, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])],
)
def test_whatever_happens_every_message_ends_once_and_rightly(examples: int) -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(max_examples=examples, stateful_step_count=60, deadline=None),
    )
