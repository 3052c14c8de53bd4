"""The world of one schedule: a publisher process, its outbox, its broker, and who uses them.

Everything that may happen is a method here; `schedule` decides what does, and when.
"""

import random
from datetime import UTC, datetime
from functools import partial
from itertools import count

from tenacity import stop_after_attempt, stop_after_delay

from reliablepub._core.decide import REFUSALS
from reliablepub._core.session import Session
from reliablepub.errors import OutboxDiskFull, OutboxLocked, ReliablePubError
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention, intervene
from reliablepub.outbox.entry import Changes, size_of
from reliablepub.outbox.opening import outbox_at
from reliablepub.outbox.outbox import Outbox
from reliablepub.outcome import OutcomeKind
from reliablepub.policy import GiveUp, Retries, RetryPolicy
from reliablepub.relay.handover import Limits, Stream
from reliablepub.relay.pauses import exchange_of
from tests.simulation.agenda import Agenda
from tests.simulation.broker import SimBroker
from tests.simulation.checker import Checker, require
from tests.simulation.disk import Durable
from tests.simulation.process import Glitches, Process
from tests.simulation.wire import LinkFaults
from tests.stores import Where

DESTINATIONS = [
    *[("", "queue")] * 12,
    *[("", "unbound")] * 2,
    *[("", "limited")] * 2,
    ("", "mirrored"),
    ("missing", "queue"),
    ("forbidden", "queue"),
    ("oversized", "queue"),
    ("", "unencodable"),
]
KEYS = "ab"
DEADLY = [("fatal", "queue"), ("garbled", "queue"), ("crushing", "queue")]
"""Where some schedules publish, too: each such message costs connections."""


class World:
    """A world made from a seed.

    Args:
        seed: any number.
        where: path of the outbox, best in memory; or URL of an empty one in PostgreSQL.
    """

    def __init__(self, seed: int, where: Where) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.host = random.Random(f"{seed}: the host, and for how long people are patient")
        self.page = random.Random(-1 - seed).choice([1, 3, 500])
        self.patient = self.host.choice([0.0, 0.0, 0.5, 1.0])
        self.history: list[tuple[float, str, object]] = []
        self.agenda = Agenda()
        self.path = where if rng.random() < 0.9 else None
        self.messages_left = rng.choice([4, 12, 25, 50])
        self.faults = LinkFaults(latency_s=rng.choice([0.0, 0.001, 0.02, 0.3]))
        self.broker = SimBroker(self.agenda, rng, self.note)
        self.broker.pace_s = rng.choice([0.001, 0.05, 0.5])
        self.broker.confirms_s = rng.choice([0.001, 0.02, 0.3])
        self.broker.has_one_channel = self.host.random() < 0.2
        self.faults.bytes_per_s = self.host.choice([0.0, 0.0, 0.0, 1_000.0, 20_000.0])
        self._draw_limits()
        self.checker = Checker(
            budgets=self.budgets,
            budgets_s=self.budgets_s,
            confirm_timeout_s=self.confirm_timeout_s,
            discards=self.discards,
            window_max=self.window_max,
            window_bytes_max=self.window_bytes_max,
            open_max=self.messages_max,
            wall=lambda: self.agenda.wall,
            now=lambda: self.agenda.now,
            note=self.note,
        )
        self.glitches = Glitches(random.Random(f"{seed}: statements"), self.note)
        self.process: Process | None = None
        self.disk: Durable | None = None
        self.other = Outbox(where)
        self.streams: list[tuple[str, list[Message]]] = []
        self.starts_badly = 0.0
        self.is_disk_full = False
        self.is_disk_full_for_verdicts = False
        self.is_locked = False
        self.is_ending = False
        self._destinations = DESTINATIONS + (DEADLY if rng.random() < 0.3 else [])
        self._numbers = count(1)

    def _draw_limits(self) -> None:
        rng = self.rng
        self.window_max = rng.choice([1, 2, 4, 8, 30])
        self.window_min = rng.choice([1, 4, self.window_max])
        self.window_bytes_max = rng.choice([1_000, 10_000, 1_000_000])
        self.confirm_timeout_s = rng.choice([0.3, 2.0, 8.0])
        self.loaded_max = rng.choice([4, 10, 100])
        self.brief, self.later = rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.0, 0.2])
        self.in_order = rng.choice([0.0, 0.0, 0.5, 1.0])
        self.messages_max = rng.choice([8, 20, 1_000]) if self.path else self.loaded_max

        self.budgets = {kind: rng.choice([1, 2, 3]) for kind in sorted(REFUSALS)}
        self.budgets_s = {
            # Refused messages of one ordering key spend theirs one after the other.
            kind: self.host.choice([0.5, 5.0, 5.0 if kind is OutcomeKind.REFUSED else 20.0])
            for kind in sorted(REFUSALS)
            if self.host.random() < self.patient
        }
        self.discards = {kind for kind in sorted(REFUSALS) if rng.random() < 0.1}

        def retries(kind: OutcomeKind) -> Retries:
            wait_s = rng.choice([0.0, 0.1, 3.0])
            then = GiveUp.DISCARD if kind in self.discards else GiveUp.PARK
            if (budget_s := self.budgets_s.get(kind)) is not None:
                return Retries(stop_after_delay(budget_s), lambda _: max(wait_s, 0.3), then)
            return Retries(stop_after_attempt(self.budgets[kind]), lambda _: wait_s, then)

        self.policy = RetryPolicy(
            nacked=retries(OutcomeKind.NACKED),
            returned=retries(OutcomeKind.RETURNED),
            refused=retries(OutcomeKind.REFUSED),
        )

    def note(self, what: str, detail: object = "") -> None:
        """Write down what happens, to be counted and to be read."""
        self.history.append((self.agenda.now, what, detail))

    # ------------------------------------------------------------------ the publisher's life

    def start_process(self) -> None:
        """A publisher process begins, on whatever the last one left."""
        if self.process is not None:
            return
        session = lambda: Session(  # noqa: E731
            size_of,
            window_min=self.window_min,
            window_max=self.window_max,
            window_bytes_max=self.window_bytes_max,
            confirm_timeout_s=self.confirm_timeout_s,
            place_of=exchange_of,
        )
        self.process = process = Process(
            path=self.path,
            session=session,
            policy=self.policy,
            limits=Limits(self.messages_max, 200_000, self.loaded_max, 100_000),
            broker=self.broker,
            agenda=self.agenda,
            rng=self.rng,
            faults=self.faults,
            glitches=self.glitches,
            checker=self.checker,
            note=self.note,
            when_gone=self._process_gone,
        )
        process.oversleeps_s = self.rng.choice([0.0, 0.3, 1.0])
        if not self.is_ending and self.rng.random() < self.starts_badly:
            process.fuse.left = self.rng.randint(1, 40)
        if not process.start():
            return
        process.watched.fails = self._disk_error
        if self.path is None:
            self.checker.began(process._memory)
        else:
            self.disk = self.disk or Durable(self.path)
            self.disk.run = process.run
            self.checker.began(self.disk)
        self.note("started")
        process.wake()

    def _process_gone(self) -> None:
        self.process = None
        self.checker.ended(is_durable=self.path is not None)
        if self.is_ending:
            self.start_process()
        else:
            self.agenda.after(self.rng.choice([0.0, 0.1, 2.0]), self.start_process)

    def _disk_error(self, turn: Changes) -> ReliablePubError | None:
        if self.is_disk_full and (turn.new or self.is_disk_full_for_verdicts):
            self.note("disk full")
            return OutboxDiskFull("the disk is full")
        if self.is_locked:
            self.note("locked by somebody else")
            return OutboxLocked("somebody else keeps it locked")
        return None

    # ------------------------------------------------------------------ who publishes

    def new_message(self) -> Message:
        rng = self.rng
        number = next(self._numbers)
        exchange, key = rng.choice(self._destinations)
        body = b"%d " % number * rng.choice([1, 1, 1, 40, 400])
        headers = {"n": number} if rng.random() < 0.2 else None
        later_s, brief_s = rng.choice([0.01, 1.0, 20.0]), rng.choice([0.05, 1.0, 20.0])
        due = datetime.fromtimestamp(self.agenda.wall + later_s, tz=UTC)
        return Message(
            body,
            exchange,
            key,
            headers,
            f"m{number}-{exchange or key}",
            expires_in_s=brief_s if rng.random() < self.brief else None,
            not_before=due if rng.random() < self.later else None,
            ordering_key=rng.choice(KEYS) if rng.random() < self.in_order else None,
        )

    def new_messages(self) -> list[Message]:
        count = min(self.messages_left, self.rng.choice([1, 1, 1, 2, 4, 9]), self.messages_max)
        self.messages_left -= count
        return [self.new_message() for _ in range(count)]

    def somebody_publishes(self) -> None:
        """Through the front door; who waits too long may take it back."""
        if self.process is None:
            return
        messages = self.new_messages()
        if messages:
            caller = self.process.hand_over(messages)
            if self.rng.random() < 0.3:
                self.agenda.after(self.rng.choice([0.0, 0.01, 1.0]), caller.lose_patience)

    def somebody_streams(self) -> None:
        """A named source, chunk by chunk, perhaps cancelled on the way."""
        if self.process is None:
            return
        name, stream = f"source-{next(self._numbers)}", Stream()
        chunks = [chunk for _ in range(self.rng.randint(1, 4)) if (chunk := self.new_messages())]
        self.streams.append((name, [message for chunk in chunks for message in chunk]))
        gap_s = self.rng.choice([0.0, 0.01, 0.1, 0.4])
        for number, chunk in enumerate(chunks):
            put = partial(self._put_next, self.process, chunk, name, stream)
            self.agenda.after(number * gap_s, put)
        if self.rng.random() < 0.4:
            delay_s = self.rng.choice([0.0, 0.001, 0.5])
            self.agenda.after(delay_s, partial(self._cancel, stream))

    def _put_next(self, process: Process, chunk: list[Message], name: str, stream: Stream) -> None:
        """As `publish_many` does: the first chunk that fails ends it."""
        if process.is_alive and stream.error is None:
            process.hand_over(chunk, source=name, stream=stream)

    def _cancel(self, stream: Stream) -> None:
        if stream.error is None:
            self.note("stream cancelled")
            stream.error = RuntimeError("cancelled")

    def somebody_enqueues(self) -> None:
        """Another process, into the same file; perhaps in a transaction that it takes back."""
        if self.path is None or self.disk is None:
            return
        for message in self.new_messages():
            self.checker.handed_over([message])
            self.other.enqueue(message)
            self.note("enqueued elsewhere")
            self.checker.enqueued_elsewhere(message)
        if self.process is not None and self.rng.random() < 0.7:  # a hint may be lost
            self.process.ring()

    def person_retries(self) -> None:
        """Some of the parked, or all."""
        parked = self.other.parked() if self.disk is not None else []
        if not parked:
            return
        chosen = [p for p in parked if self.rng.random() < 0.7]
        self.checker.look()
        self.checker.unparked(p.message_id for p in chosen)
        assert self.other.retry([p.id for p in chosen]) == len(chosen)
        self.note("retried by a person")

    def person_intervenes(self) -> None:
        """Something is done to some messages, open or parked, beside whoever relays them."""
        if self.path is None or self.disk is None:
            return
        rows = self.disk.rows()
        chosen = [id_ for id_ in rows if self.rng.random() < 0.3]
        if not chosen:
            return
        action = self.rng.choice(sorted(Action))
        what = Intervention(
            action,
            exchange="",
            routing_key="queue",
            changes={"type": "edited"} if action is Action.EDIT else {},
            note="why",
            person="ann",
        )
        self.checker.look()
        effect = intervene(outbox_at(self.path), chosen, what, clock=lambda: self.agenda.wall)
        left_alone = {*effect.in_flight, *effect.unfit, *effect.damaged}
        changed = [rows[id_] for id_ in chosen if id_ not in left_alone]
        assert effect.changed == len(changed)
        self.note(f"a person does: {what.action}", changed)
        if effect.in_flight:
            self.note("a person leaves alone what is in flight")
        self.checker.intervened(changed, what)

    def person_decides_on_keys(self) -> None:
        """What holds a key is put back, or its key goes on without it, or everybody waits."""
        for key, ids in self.disk.held_keys().items() if self.disk is not None else ():
            self.checker.look()
            if self.rng.random() < 0.5:
                self.checker.skipped(ids)
                assert self.other.skip_key(key) == len(ids)
                self.note("key skipped by a person", ids)
            elif self.rng.random() < 0.5:
                self.checker.unparked(ids)
                assert self.other.resume_key(key) == len(ids)
                self.note("key resumed by a person", ids)
            self.checker.look()

    def intervene_before_commit(self) -> None:
        """Somebody is faster than the relay, whose next turn is decided and not yet stored."""
        if self.process is not None:
            somebody = [self.person_intervenes, self.person_decides_on_keys]
            self.process.watched.before_commit = self.rng.choice(somebody)

    # ------------------------------------------------------------------ what goes wrong

    def cut(self) -> None:
        """The network breaks every connection."""
        for wire in list(self.broker.wires):
            self.note("connection cut")
            wire.cut("reset by peer")

    def close_channels(self) -> None:
        """The broker closes channels for no fault of a publish."""
        for wire in list(self.broker.wires):
            for epoch in list(wire.channels):
                self.note("channel closed: 541")
                self.broker.close_channel(wire, epoch, 541, "INTERNAL_ERROR", by_publish=False)

    def go_mute(self) -> None:
        """Channels that take publishes and confirm nothing for a long time, or never."""
        for wire in self.broker.wires:
            for channel in wire.channels.values():
                self.note("channel mute")
                self.broker.mute(wire, channel, self.rng.choice([0.1, 1.0, 9.0, 1e6]))

    def crash_broker(self) -> None:
        self.note("broker crashed")
        self.broker.crash()
        self.agenda.after(self.rng.choice([0.0, 0.5, 5.0]), self.broker.restart)

    def burn_fuse(self) -> None:
        """The process dies after so many more steps."""
        if self.process is not None:
            self.process.fuse.left = self.rng.randint(1, 60)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()

    def flush(self) -> None:
        """Somebody begins to wait until the outbox is empty, or stops waiting."""
        if self.process is not None:
            self.process.is_flushing = not self.process.is_flushing

    def jump(self) -> None:
        """Somebody sets the wall clock."""
        seconds = self.rng.choice([-30.0, -1.0, 1.0, 60.0, 1e6])
        self.note(f"wall clock set {'back' if seconds < 0 else 'forward'}", seconds)
        self.agenda.wall_offset += seconds
        self.checker.clock_is_set(seconds)

    # ------------------------------------------------------------------ the end

    def heal(self) -> None:
        """From here on nothing else goes wrong; what is broken stays broken where it may."""
        self.is_ending = True
        self.starts_badly = 0.0
        self.is_disk_full = self.is_locked = False
        self.glitches.share = 0.0
        well = LinkFaults(bytes_per_s=self.faults.bytes_per_s)
        self.faults.__dict__.update(well.__dict__)
        self.broker.opens_slowly = self.broker.is_fragile = self.broker.refuses_all = False
        if self.broker.is_alarmed:
            self.broker.calm()
        self.broker.release()
        self.broker.restart()
        if self.process is None:
            self.start_process()
        else:
            self.process.fuse.left = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is left to do."""
        process = self.process
        if self.disk is not None and self.disk.held_keys():
            self.person_decides_on_keys()
            return False
        return (
            process is not None
            and not process.inbox.chunks
            and process.relay.lowest_awaited(0, float("inf")) is None
            and not process.relay.status.in_flight
        )

    def finish(self) -> None:
        """Close everything, and the account."""
        assert self.process is not None
        self._check_memory(self.process)
        self.process.watched.close()
        self.checker.close_the_account([k.message for k in self.broker.keeps], self.broker.accepted)
        for name, messages in self.streams if self.path else ():
            assert self.disk is not None
            seen = [self.checker.has_seen(message) for message in messages]
            position = self.disk.position(name)
            require(seen == sorted(seen, reverse=True), f"{name} is stored with a hole: {seen}")
            require(position == sum(seen), f"{name} is at {position}, and {sum(seen)} are stored")
        if self.disk is not None:
            require(self.disk.left_in_flight() == 0, "something is recorded as in flight for ever")

    def _check_memory(self, process: Process) -> None:
        """Nothing is left in memory of what is gone, once it has looked what others did."""
        self.agenda.now += 1.0  # after a commit that has failed it waits
        process.relay._elsewhere.look_at = 0.0
        process.relay.turn(is_flushing=True)
        for _ in KEYS:  # a page may hold one message, and so one key
            process.relay.turn(is_flushing=True)
        loaded = process.relay._loaded
        turns = loaded._order
        require(not turns.wanted, "a turn is left in memory")
        require(not turns._admitted, "an admitted message is left in memory")
        require(loaded._deadlines.watched == {}, "a deadline is left in memory")
        left = (loaded._messages, loaded._bytes, len(loaded.waiters), loaded._due)
        require(left == (0, 0, 0, {}), f"left in memory: {left}")
        for lane in (process.relay._session._main, process.relay._session._quarantine):
            require(not lane._batches, "a batch is left in memory")
        for caller in process.callers:
            require(caller.is_answered, "a caller waits in vain to hear that it is stored")
            self.checker.must_all_be_told(caller.messages)

    def tidy(self) -> None:
        """Close every file, whatever has happened."""
        self.other.close()
        if self.disk is not None:
            self.disk.close()
        if self.process is not None:
            self.process.when_gone = lambda: None
            self.process.die()
