"""The judge: what was promised, written, heard and told, and what must be true of it at any moment.

It reads the outbox with a connection of its own, works out what the broker's words mean by a naive
reading of RabbitMQ's rules (`Epoch`), and must never ask the code under test.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reliablepub._core.events import (
    Acked,
    Blocked,
    ChannelClosed,
    ChannelOpened,
    Connected,
    ConnectionClose,
    ConnectionLost,
    Event,
    Leaving,
    Nacked,
    Returned,
    Unblocked,
)
from reliablepub.message import Message
from reliablepub.outbox.admin.interventions import Action, Intervention
from reliablepub.outcome import Outcome, OutcomeKind
from tests.simulation.agenda import Note
from tests.simulation.disk import Disk, Words

WITHDRAWN = "withdrawn"
NOT_ALLOWED = 530
PRECONDITION = 406
HARD = 500
"""Codes from here on are about no single message."""
SEVERAL = 3
"""Different messages in a row, after which a refusal is the exchange's."""
HAS_WAITED = " (last refusal by its destination, for which it has waited)"
DEPARTURES_S = 0.1
"""A publish that was still leaving at one look may have left right after it."""
ROUNDING_S = 1e-3


class Violation(AssertionError):
    """The promise is broken."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


@dataclass
class Story:
    """Everything that is known of one message.

    Attributes:
        message: as it is to be sent.
        as_handed_over: with its times.
        since: when it was handed over or last put back, in virtual time.
        stored_at: when it was handed over, by the wall clock.
        was_retried: a person has put it back.
        is_skipped: it is parked, and a person lets its key go on without it.
        gave_way: it was expired or skipped before that, so that others of its key may go first,
            until it is sent again.
        versions: the addresses that it has had.
        is_due_now: a person has made it so.
        is_promised: somebody was told that it is stored.
        is_turned_away: somebody was told that it is not.
        was_seen: it has been on disk.
        acked_in: the last run that heard the broker confirm it, 0 for none.
        live: epoch and tag while it is in flight in the present run.
        refusals: what the broker said against it, since a person last retried it.
        suspected: by reply code, how many messages had passed when a channel was closed with it.
        words: the same, in the broker's words.
        told: what its caller was told, and by which run.
    """

    message: Message
    as_handed_over: Message
    since: float
    stored_at: float
    was_retried: bool = False
    is_skipped: bool = False
    gave_way: bool = False
    is_due_now: bool = False
    is_promised: bool = False
    is_turned_away: bool = False
    was_seen: bool = False
    acked_in: int = 0
    live: tuple[int, int] | None = None
    sends: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    words: set[Words] = field(default_factory=set)
    suspected: dict[int, int] = field(default_factory=dict)
    told: tuple[str, int] | None = None
    versions: list[Message] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = [self.message]


@dataclass
class Epoch:
    """One channel as RabbitMQ's documents describe it: which publish has which tag, and its end."""

    stories: list[Story] = field(default_factory=list)
    outstanding: dict[int, Story] = field(default_factory=dict)
    returned: dict[int, Words] = field(default_factory=dict)
    left_at: dict[int, float] = field(default_factory=dict)
    is_open: bool = False
    is_over: bool = False


class Checker:
    """Holds every invariant, after every event; raises `Violation` at the first that is broken.

    Args:
        budgets: how many refusals of each kind a message must have had before it is given up.
        budgets_s: for how many seconds a kind is tried again, where the budget is a time.
        confirm_timeout_s: for how long at least the broker may owe a confirm.
        discards: kinds after which it is then discarded, not parked.
        window_max: messages in flight.
        window_bytes_max: their bytes.
        open_max: messages on disk, beside those that came from elsewhere.
        wall: the time that people read.
        now: virtual time.
        note: called with the name of whatever happens, to be counted.
    """

    def __init__(
        self,
        *,
        budgets: Mapping[OutcomeKind, int],
        budgets_s: Mapping[OutcomeKind, float],
        confirm_timeout_s: float,
        discards: Collection[OutcomeKind],
        window_max: int,
        window_bytes_max: int,
        open_max: int,
        wall: Callable[[], float],
        now: Callable[[], float],
        note: Note,
    ) -> None:
        self._budgets = {str(kind): count for kind, count in budgets.items()} | {WITHDRAWN: 0}
        self._budgets_s = {str(kind): seconds for kind, seconds in budgets_s.items()}
        self._confirm_timeout_s = confirm_timeout_s
        self._discards = discards
        self._window_max = window_max
        self._window_bytes_max = window_bytes_max
        self._open_max = open_max
        self._elsewhere: set[str] = set()
        self._note = note
        self._wall = wall
        self._now = now
        self._said: dict[str, dict[Words, float]] = {}
        self._passes = 0
        self._passed: dict[str, int] = {}
        self._in_a_row: dict[str, tuple[int, set[str | None]]] = {}
        self._has_one_channel = False
        self._disk: Disk | None = None
        self._run = 0
        self._is_running = False
        self._is_blocked = False
        self._epochs: dict[int, Epoch] = {}
        self.stories: dict[str, Story] = {}
        self.live: dict[str, Story] = {}
        self._open: set[str] = set()
        self._parked: dict[str, Words] = {}
        self._promised: set[str] = set()
        self._gone: set[str] = set()
        self._discarded: set[str] = set()
        self._acked: set[str] = set()
        self._chunks: list[list[str]] = []
        self.clock_was_set = False
        self._latest_wall = 0.0
        self.is_step_pending = self.is_clock_lost = False

    # ------------------------------------------------------------------ the clock

    def clock_is_set(self, seconds: float) -> None:
        """The wall clock is set; a relay that runs makes good for it, and only such a one can."""
        self.clock_was_set = True
        self._latest_wall = max(self._latest_wall, self._wall() - seconds)
        for story in self.stories.values():
            if not story.was_seen:  # it is stored by the clock that is set now
                story.stored_at = min(story.stored_at, self._wall())
        self.is_step_pending = True
        self.is_clock_lost |= not self._is_running

    def times_are_moved(self) -> None:
        """The relay has committed what it does about a clock that was set."""
        if self.is_step_pending:
            self._note("times moved with the clock")
        self.is_step_pending = False

    # ------------------------------------------------------------------ the process

    def began(self, disk: Disk) -> None:
        """A process has opened the outbox."""
        require(disk.run > self._run, "a run has the number of an earlier one")
        self._disk, self._run = disk, disk.run
        self._is_running = True
        self._is_blocked = self._has_one_channel = False
        self._epochs.clear()
        self._acked.clear()
        self.look()
        for ids in self._chunks:
            seen = sum(self.stories[id_].was_seen for id_ in ids)
            require(seen in (0, len(ids)), f"a chunk is stored in part: {ids}")
        self._chunks.clear()

    def ended(self, *, is_durable: bool) -> None:
        """The process is gone; without a disk, so is all that it promised."""
        if self._acked & self._open:
            self._note("an acked message outlived a crash")
        self._acked.clear()
        self.is_clock_lost |= self.is_step_pending
        self._is_running = False  # what was confirmed and outlived it, a person may park
        for story in self.live.values():
            story.live = None
        self.live.clear()
        if is_durable:
            if self._disk is not None:
                self.look()
            return
        for id_ in self._open:
            self._gone.add(id_)
        self._run, self._disk = 0, None
        self._open, self._parked, self._promised = set(), {}, set()
        self._chunks.clear()

    # ------------------------------------------------------------------ the callers' side

    def handed_over(self, messages: Sequence[Message]) -> None:
        """Somebody tries to store these together; whether that works is not known yet."""
        for message in messages:
            assert message.message_id is not None
            story = Story(_timeless(message), message, self._now(), self._wall())
            self.stories.setdefault(message.message_id, story)
        self._chunks.append([message.message_id or "" for message in messages])

    def enqueued_elsewhere(self, message: Message) -> None:
        """Another process has stored it."""
        self._elsewhere.add(message.message_id or "")
        self.promised([message])

    def promised(self, messages: Iterable[Message]) -> None:
        """Their caller was told that they are stored."""
        self.look()
        require(
            len(self._open - self._elsewhere) <= self._open_max,
            "more is open than the limit allows",
        )
        for message in messages:
            story = self._story(message)
            require(not story.is_promised, f"{message!r}: told twice that it is stored")
            require(not story.is_turned_away, f"{message!r}: first refused, then stored")
            story.is_promised = True
            self._promised.add(message.message_id or "")
            require(message.message_id in self._open, f"{message!r} is promised, and not on disk")

    def turned_away(self, messages: Iterable[Message]) -> None:
        """Their caller was told that they are not stored."""
        self.look()
        for message in messages:
            story = self._story(message)
            require(not story.is_promised, f"{message!r}: first stored, then refused")
            require(not story.was_seen, f"{message!r} was refused, and is stored")
            story.is_turned_away = True

    def has_seen(self, message: Message) -> bool:
        """Whether it has ever been on disk."""
        story = self.stories.get(message.message_id or "")
        return story is not None and story.was_seen

    def told(self, message: Message, outcome: Outcome) -> None:
        """Their caller was told how it ended."""
        story = self._story(message)
        require(story.told is None, f"{message!r} is told twice how it ended")
        if outcome.kind is OutcomeKind.CONFIRMED:
            require(story.acked_in == self._run, f"{message!r} is told confirmed, and is not")
        else:
            self.look()
            parked = self._parked.get(message.message_id or "")
            words = (outcome.kind, outcome.reply_code, outcome.reply_text)
            is_discarded = outcome.kind in self._discards and message.message_id in self._gone
            is_true = parked == words or (is_discarded and self._has_said(story, words))
            require(is_true, f"{message!r} is told {words}, and is {parked}")
        story.told = (outcome.kind, self._run)

    def must_all_be_told(self, messages: Iterable[Message]) -> None:
        """Nobody whose process has lived to the end waits in vain; a retry is not told again."""
        for message in messages:
            story = self._story(message)
            is_known = story.told is not None or story.was_retried or not story.is_promised
            require(is_known, f"whoever waits for {message!r} is never told how it ended")

    def told_withdrawn(self, message_id: str) -> None:
        """Their caller was told that a person has taken it."""
        self.look()
        story = self.stories[message_id]
        require(story.told is None, f"{message_id} is told twice how it ended")
        require(
            message_id in self._discarded or message_id in self._parked,
            f"{message_id} is told withdrawn, and is open",
        )
        story.told = (WITHDRAWN, self._run)

    def intervened(self, ids: Iterable[str], what: Intervention) -> None:
        """A person has done something to these, open or parked."""
        for id_ in ids:
            story = self.stories[id_]
            require(story.live is None, f"{id_} is changed by a person, and in flight")
            require(id_ not in self._acked, f"{id_} is changed by a person, and confirmed")
            if what.action is Action.SKIP:
                self.skipped([id_])
                continue
            if what.action is Action.PARK:
                story.words.add((WITHDRAWN, 0, f"parked by {what.person}: {what.note}"))
                continue
            if what.action is Action.DISCARD:
                self._open.discard(id_)
                self._parked.pop(id_, None)
                self._gone.add(id_)
                self._discarded.add(id_)
                continue
            story.is_due_now = True
            if id_ in self._parked:
                self.unparked([id_])
            if what.action in {Action.REROUTE, Action.EDIT}:
                story.message = what.revise(story.message)
                story.versions.append(story.message)

    def skipped(self, ids: Iterable[str]) -> None:
        """A person lets their keys go on without them; they stay parked."""
        for id_ in ids:
            require(id_ in self._parked, f"{id_} was not parked")
            self.stories[id_].is_skipped = True

    def unparked(self, ids: Iterable[str]) -> None:
        """A person has put them back."""
        for id_ in ids:
            words = self._parked.pop(id_, None)
            require(words, f"{id_} was not parked")
            self._open.add(id_)
            self._elsewhere.add(id_)
            story = self.stories[id_]
            story.was_retried = True
            story.since = self._now()
            is_expired = words is not None and words[0] == OutcomeKind.EXPIRED
            story.gave_way |= is_expired or story.is_skipped
            story.is_skipped = False
            story.refusals.clear()
            story.words.clear()
            story.told = None

    # ------------------------------------------------------------------ on disk

    def look(self, *, is_after_commit: bool = False) -> None:
        """Compare what is on disk with what was there, and what was promised."""
        assert self._disk is not None
        rows, parked = self._disk.open_ids(), self._disk.parked()
        found = set(rows)
        require(len(rows) == len(found), "a message is stored twice")
        require(not found & parked.keys(), "a message is open and parked at once")
        for id_ in (found | parked.keys()) - self._open - self._parked.keys():
            story = self.stories.get(id_)
            require(story is not None, f"{id_} was never handed over")
            assert story is not None
            require(not story.is_turned_away, f"{id_} is stored, and its caller was refused")
            require(id_ not in self._gone, f"{id_} was settled, and is back")
            story.was_seen = True
        for id_ in self._open - found - parked.keys():
            story = self.stories[id_]
            if story.acked_in != self._run:
                is_discarded = any(self._is_spent(story, kind) for kind in self._discards)
                require(is_discarded, f"{id_} is deleted, and was not confirmed")
                self._discarded.add(id_)
                self._note("discarded by the policy")
            self._gone.add(id_)
        for id_, words in parked.items():
            if id_ not in self._parked:
                self._check_parked(id_, words)
        require(self._parked.keys() <= parked.keys(), "a parked message is gone")
        lost = self._promised - found - parked.keys() - self._gone
        require(not lost, f"lost: {lost}")
        self._open, self._parked = found, parked
        if is_after_commit:
            self._check_kept(self._acked & found)
        require(self._disk.audit() == [], f"the ledger does not add up: {self._disk.audit()}")

    def _check_kept(self, kept: set[str]) -> None:
        """A commit may leave a window of confirmed messages in the outbox, but none of a key."""
        require(len(kept) <= self._window_max, f"confirmed, and more than a window stays: {kept}")
        keyed = {id_ for id_ in kept if self.stories[id_].message.ordering_key is not None}
        require(not keyed, f"confirmed before the commit, and holds up its key: {keyed}")

    def _check_parked(self, id_: str, words: Words) -> None:
        kind, _, text = words
        story = self.stories[id_]
        require(text, f"{id_} is parked without a reason")
        if kind == OutcomeKind.EXPIRED:
            self._check_expired(story, text)
            return
        is_said = self._has_said(story, words)
        require(is_said, f"{id_} is parked as {words}; the broker said {story.words}")
        if words not in story.words:
            self._note("parked: its destination was refused for too long")
        said = f"{story.refusals[kind]} refusals, {self._now() - story.since:.3f} s"
        require(self._is_spent(story, kind), f"{id_} is parked as {kind} after {said}")
        if story.told is not None and self._is_running:
            require(story.told[1] != self._run, f"{id_} is parked, and told {story.told}")
        self._note(f"parked: {kind}")

    def _has_said(self, story: Story, words: Words) -> bool:
        """Whether the broker has said this of the message, or of others to its destination."""
        kind, code, text = words
        if not text.endswith(HAS_WAITED):
            return words in story.words
        said = self._said.get(story.message.exchange, {})
        return (kind, code, text.removesuffix(HAS_WAITED)) in said

    def _is_spent(self, story: Story, kind: str) -> bool:
        """Whether the message may be given up: by its refusals, or by the time they have taken.

        Nobody waits for a destination before the first refusal there.
        """
        budget_s = self._budgets_s.get(kind)
        if budget_s is None:
            return story.refusals[kind] >= self._budgets[kind]
        first = [at for words, at in self._said.get(story.message.exchange, {}).items()]
        if not first:
            return False
        waited_s = self._now() - max(story.since, min(first))
        return self.is_clock_lost or self.is_step_pending or waited_s >= budget_s - ROUNDING_S

    def _check_expired(self, story: Story, text: str) -> None:
        seconds = story.as_handed_over.expires_in_s
        require(seconds is not None, f"{story.message!r} has no deadline, and is expired")
        require(not story.was_retried, f"{story.message!r} was put back, and is expired")
        require(story.live is None, f"{story.message!r} is expired, and in flight")
        require(text != "not sent" or not story.sends, f"{story.message!r} was sent all the same")
        is_late = (
            max(self._wall(), self._latest_wall) >= story.stored_at + (seconds or 0.0) - ROUNDING_S
        )
        require(is_late, f"{story.message!r} is expired before its time")
        if story.told is not None:
            require(story.told[1] != self._run, f"{story.message!r} is expired, and told otherwise")
        self._note(f"expired: {text}")

    # ------------------------------------------------------------------ on the wire

    def asked_for(self, epoch: int) -> None:
        require(epoch not in self._epochs, f"epoch {epoch} is opened twice")
        is_second = any(not other.is_over for other in self._epochs.values())
        require(
            not (self._has_one_channel and is_second),
            "a second channel is opened again, and has cost a connection before",
        )
        self._epochs[epoch] = Epoch()

    def gave_up(self, epoch: int) -> None:
        """The publisher closes a channel: nothing that is still said there counts."""
        if self._epochs[epoch].outstanding:
            self._note("retired with confirms outstanding")
            self._check_patience(self._epochs[epoch])
        self._end(self._epochs[epoch])

    def leaves(self, epoch: int, tag: int, at: float) -> None:
        """The last byte of a publish leaves the host at this time."""
        self._epochs[epoch].left_at[tag] = at

    def _check_patience(self, epoch: Epoch) -> None:
        """The broker has had the oldest publish for as long as a confirm may take."""
        oldest = min(epoch.outstanding)
        owed_s = self._now() - epoch.left_at.get(oldest, 0.0)
        is_patient = owed_s >= self._confirm_timeout_s - DEPARTURES_S - ROUNDING_S
        require(is_patient, f"a channel is given up {owed_s:.3f} s after its oldest has left")

    def unencodable(self, message: Message, text: str) -> None:
        """The transport has refused to write it."""
        story = self._story(message)
        self._refused(story, (OutcomeKind.REFUSED, 0, text))

    def sent(self, number: int, first_tag: int, messages: Sequence[Message]) -> None:
        """The publisher writes publishes."""
        assert self._disk is not None
        epoch = self._epochs[number]
        require(epoch.is_open and not epoch.is_over, f"sent on channel {number}, which is not open")
        require(not self._is_blocked, "sent while the broker blocks us")
        require(first_tag == len(epoch.stories) + 1, f"tag {first_tag} is counted wrong")
        self.look()
        recorded = self._disk.in_flight(number, first_tag)
        require(recorded in (None, len(messages)), f"sent {len(messages)}, recorded {recorded}")
        for tag, message in enumerate(messages, first_tag):
            story = self._story(message)
            require(_timeless(message) == story.message, f"{message!r} is not what was handed over")
            self._check_turn(story)
            require(message.message_id in self._open, f"{message!r} is sent, and not on disk")
            require(story.live is None, f"{message!r} is in flight twice")
            require(story.acked_in != self._run, f"{message!r} is confirmed, and sent again")
            self._note("sent again" if story.sends else "sent", (number, tag, message.message_id))
            story.sends += 1
            story.gave_way = False
            story.live = (number, tag)
            epoch.stories.append(story)
            epoch.outstanding[tag] = story
            self.live[message.message_id or ""] = story
        require(len(self.live) <= self._window_max, "more is in flight than the window allows")
        if len(self.live) == self._window_max:
            self._note("window full")
        size = sum(story.message.size for story in self.live.values())
        require(
            size <= self._window_bytes_max or len(self.live) == 1,
            "more bytes are in flight than the window allows",
        )

    def _check_turn(self, story: Story) -> None:
        """Nobody goes before its time, or before an earlier one of its key."""
        assert self._disk is not None
        due, key = story.as_handed_over.not_before, story.message.ordering_key
        if due is not None and not (self.clock_was_set or story.was_retried or story.is_due_now):
            require(due.timestamp() <= self._wall(), f"{story.message!r} is sent before it is due")
            self._note("sent when it was due")
        if key is None:
            return
        others = [s for s in self.live.values() if s.message.ordering_key == key]
        require(not others, f"two of key {key} are in flight")
        earlier = self._disk.before(story.message.message_id or "", key)
        before = [id_ for id_ in earlier if not self.stories[id_].gave_way]
        require(not before, f"{story.message!r} is sent before {before}")
        self._note("sent in its turn")

    def heard(self, event: Event, guilty: Message | None) -> None:
        """The publisher takes in an event.

        Args:
            event: what happened.
            guilty: the message that the broker closed the channel, or all of it, for.
        """
        self._note("heard", event)
        match event:
            case Connected():
                self._is_blocked = False
                self._passed.clear()
            case ConnectionLost(_, close):
                self._lost(close)
            case Blocked():
                self._note("blocked")
                self._is_blocked = True
            case Unblocked():
                self._is_blocked = False
            case Leaving():
                pass
            case _:
                epoch = self._epochs[event.epoch]
                if epoch.is_over:
                    self._note(f"stale {type(event).__name__}")
                else:
                    self._heard_on(epoch, event, guilty)

    def _lost(self, close: ConnectionClose | None) -> None:
        self._is_blocked = False
        if close is not None and close.reply_code == NOT_ALLOWED:
            live = [epoch for epoch in self._epochs.values() if not epoch.is_over]
            self._has_one_channel |= len(live) > 1
        if self.live:
            self._note("connection lost with messages in flight")
        for epoch in self._epochs.values():
            self._end(epoch)

    def _heard_on(self, epoch: Epoch, event: Event, guilty: Message | None) -> None:
        match event:
            case ChannelOpened():
                epoch.is_open = True
            case Acked(_, tag, multiple) | Nacked(_, tag, multiple):
                if tag == 0 or tag > len(epoch.stories):
                    self._end(epoch)
                    return
                tags = range(1, tag + 1) if multiple else [tag]
                covered = [t for t in tags if t in epoch.outstanding]
                if len(covered) > 1:
                    self._note("several settled at once")
                for t in covered:
                    self._settle(epoch, t, is_ack=isinstance(event, Acked))
            case Returned(_, tag, code, text):
                if tag == 0:
                    self._end(epoch)
                elif tag in epoch.outstanding:
                    epoch.returned[tag] = (OutcomeKind.RETURNED, code, text)
            case ChannelClosed(_, code, text, by_publish):
                self._closed(epoch, (OutcomeKind.REFUSED, code, text), guilty, by_publish)

    def _settle(self, epoch: Epoch, tag: int, *, is_ack: bool) -> None:
        story = self._landed(epoch, tag)
        exchange = story.message.exchange
        self._passes += 1
        self._passed[exchange] = self._passes
        self._in_a_row.pop(exchange, None)
        if tag in epoch.returned:
            self._refused(story, epoch.returned[tag])
        elif is_ack:
            story.acked_in = self._run
            self._acked.add(story.message.message_id or "")
            self._note("confirmed")
        else:
            self._refused(story, (OutcomeKind.NACKED, 0, "basic.nack"))

    def _closed(
        self,
        epoch: Epoch,
        words: Words,
        guilty: Message | None,
        by_publish: bool,  # noqa: FBT001
    ) -> None:
        """Who was alone in flight when it happened, and was not returned, is the guilty one."""
        suspects = [tag for tag in epoch.outstanding if tag not in epoch.returned]
        for tag in suspects if by_publish else ():
            epoch.outstanding[tag].suspected.setdefault(words[1], self._passes)
        if by_publish and len(suspects) == 1:
            story = epoch.outstanding[suspects[0]]
            is_guilty = guilty is not None and guilty.message_id == story.message.message_id
            require(is_guilty, f"{story.message!r} is innocent, and alone suspected")
            if words[1] < HARD and self._is_proven(story, words[1]):
                self._refused(story, words)
                self._note("found guilty")
        elif by_publish:
            self._note("several suspects")
        self._end(epoch)

    def _is_proven(self, story: Story, code: int) -> bool:
        """Whether a message that closed its channel alone, or its exchange, is at fault.

        404 and 403 name the exchange. Otherwise another message must have passed to the exchange
        since, on this connection; or several to the exchange were refused in a row.
        """
        exchange = story.message.exchange
        if code != PRECONDITION or self._passed.get(exchange, 0) > story.suspected[code]:
            return True
        since, ids = self._in_a_row.setdefault(exchange, (self._passes, set()))
        ids.add(story.message.message_id)
        return len(ids) >= SEVERAL and self._passes > since

    def _end(self, epoch: Epoch) -> None:
        """Nothing more will be known of what is outstanding here."""
        epoch.is_over = True
        for tag in list(epoch.outstanding):
            story = self._landed(epoch, tag)
            if tag in epoch.returned:
                self._note("returned, and the channel gone before its confirm")
                self._refused(story, epoch.returned[tag])

    def _landed(self, epoch: Epoch, tag: int) -> Story:
        story = epoch.outstanding.pop(tag)
        story.live = None
        del self.live[story.message.message_id or ""]
        return story

    def _refused(self, story: Story, words: Words) -> None:
        story.refusals[words[0]] += 1
        story.words.add(words)
        self._said.setdefault(story.message.exchange, {}).setdefault(words, self._now())

    # ------------------------------------------------------------------ the end

    def close_the_account(self, kept: Sequence[Message], accepted: Sequence[Message]) -> None:
        """Nothing is open any more: every promise is kept, or parked.

        Args:
            kept: what is in the broker's queues.
            accepted: every message a queue ever took.
        """
        self.look()
        require(not self._open, f"still open: {self._open}")
        in_queues = {message.message_id: _timeless(message) for message in kept}
        for id_, story in self.stories.items():
            is_same = id_ not in in_queues or in_queues[id_] in story.versions
            require(is_same, f"{id_} was changed")
            if story.acked_in:
                require(id_ in in_queues, f"{id_} was confirmed, and is in no queue")
            if story.is_promised and id_ in self._promised:
                is_parked = id_ in self._parked
                is_discarded = id_ in self._discarded
                require(
                    is_parked or is_discarded or story.acked_in, f"{id_} has come to no known end"
                )
            if story.is_turned_away:
                require(story.sends == 0, f"{id_} was refused, and sent")
        copies = Counter(message.message_id for message in accepted)
        for copy, count in copies.items():
            require(copy in self.stories, f"{copy} is in a queue, and was never handed over")
            require(count <= self.stories[copy or ""].sends, f"{copy} arrived more often than sent")
            if count > 1:
                self._note("arrived twice")

    def _story(self, message: Message) -> Story:
        story = self.stories.get(message.message_id or "")
        require(story is not None, f"{message!r} was never handed over")
        assert story is not None
        return story


def _timeless(message: Message) -> Message:
    """As it is when it is read back: its times are the outbox's by then."""
    return replace(message, expires_in_s=None, not_before=None)
