"""One seed, one schedule: what is published, what goes wrong and when, and how it must end.

Every seed draws its own kinds of faults and its own numbers, so that rare things meet often in some
schedules and not at all in others. The same seed gives the same schedule, to the last event.
"""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from tests.simulation.agenda import Action
from tests.simulation.checker import require
from tests.simulation.world import World

DRAIN_MAX_S = 3_600.0
"""Virtual seconds within which an outbox must be empty once everything is well again: four of the
longest pauses of a destination (`Breaker`). A full queue stays full, and messages of a key wait for
one another."""
HISTORY_MAX = 20_000
HISTORY_TAIL = 60
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Report:
    """What one schedule was.

    Attributes:
        seed: as given.
        history: time, what, and details of all that happened.
    """

    seed: int
    history: list[tuple[float, str, object]]

    @property
    def happened(self) -> Counter[str]:
        """What happened, and how often."""
        return Counter(what for _, what, _ in self.history)

    def lines(self) -> list[str]:
        """The history, to be read."""
        return [f"{time:10.4f}  {what}  {detail}".rstrip() for time, what, detail in self.history]


class Failed(AssertionError):
    """A seed that broke an invariant, and how to see it again.

    Attributes:
        report: everything that happened before.
    """

    def __init__(self, report: Report, error: BaseException) -> None:
        tail = "\n".join(report.lines()[-HISTORY_TAIL:])
        super().__init__(
            f"seed {report.seed}: {type(error).__name__}: {error}\n"
            f"see it again: python -m tests.simulation {report.seed}\n{tail}"
        )
        self.report = report

    def __reduce__(self) -> tuple[type[AssertionError], tuple[object, ...]]:
        """For the process that has ordered the run: the text."""
        return AssertionError, self.args


def run(seed: int, database: str | None = None) -> Report:
    """Run one schedule.

    Args:
        seed: any number.
        database: URL of an empty outbox in PostgreSQL; None for a file.

    Raises:
        Failed: an invariant was broken; says which, and how to see it again.
    """
    with _folder() as folder, _virtual(seed):
        world = World(seed, database or folder / "outbox.db")

        def wall() -> float:
            return world.agenda.wall

        with (
            _known_relay(world, database),
            mock.patch("time.time", wall),
            mock.patch("reliablepub.relay.loaded.PAGE", world.page),
            mock.patch("reliablepub.relay.pauses.PAGE", world.page),
        ):
            try:
                _plan(world)
                _play(world)
            except BaseException as error:
                raise Failed(Report(seed, world.history), error) from error
            finally:
                world.tidy()
    return Report(seed, world.history)


def run_all(seeds: Iterable[int]) -> Counter[str]:
    """Run many schedules, and add up what happened.

    Raises:
        Failed: the first that broke an invariant.
    """
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += run(seed).happened
    return happened


def _known_relay(world: World, database: str | None) -> AbstractContextManager[None]:
    if database is None:
        return nullcontext()
    from tests.simulation.database import known_relay  # noqa: PLC0415 - it needs psycopg

    return known_relay(lambda: world.process is not None)


@contextmanager
def _folder() -> Iterator[Path]:
    """In memory where that is possible: what is tried here is order, not fsync."""
    path = Path(tempfile.mkdtemp(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def _virtual(seed: int) -> Iterator[None]:
    """Chance as the code under test sees it (waits with jitter), from the same seed."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _plan(world: World) -> None:
    """Put everything that will happen onto the agenda."""
    rng, agenda = world.rng, world.agenda
    start = agenda.now
    end = start + rng.choice([0.3, 1.0, 4.0, 12.0])
    world.start_process()
    who = [world.somebody_publishes] * 4 + [world.somebody_streams, world.somebody_enqueues]
    times = [rng.uniform(start, end) for _ in range(rng.choice([4, 10, 20]))]
    for time in times:
        agenda.at(time, rng.choice(who))
    faults = _faults(world)
    for fault in rng.sample(faults, rng.randint(0, len(faults))):
        for _ in range(rng.choice([1, 1, 2, 5])):
            # Most of what may go wrong needs something to be under way.
            shortly_after = rng.choice(times) + rng.expovariate(1 / rng.choice([0.003, 0.03, 0.3]))
            time = rng.choice([rng.uniform(start, end), shortly_after])
            if time < end:
                agenda.at(time, fault)
    world.faults.notice_max_s = rng.choice([0.0, 0.0, 0.05, 5.0])
    world.faults.strips_headers = rng.choice([0.0, 0.0, 0.0, 0.3])
    world.faults.sins = rng.choice([0.0, 0.0, 0.1, 0.4])
    world.faults.refuses = rng.choice([0.0, 0.0, 0.5])
    world.starts_badly = rng.choice([0.0, 0.0, 0.5])
    agenda.at(end, world.heal)
    _plan_glitches(world, start, end)
    _plan_refusals(world, start, end)
    _plan_stuck_queue(world, start, end)


def _plan_glitches(world: World, start: float, end: float) -> None:
    """In some schedules, statements fail for a while, now and then or all of them."""
    rng = random.Random(f"{world.seed}: glitches")
    for _ in range(rng.choice([0, 0, 0, 5])):
        at, lasts_s = rng.uniform(start, end), rng.choice([0.1, 1.0, 5.0])
        share = rng.choice([0.05, 0.2, 1.0])
        world.agenda.at(at, partial(setattr, world.glitches, "share", share))
        world.agenda.at(min(at + lasts_s, end), partial(setattr, world.glitches, "share", 0.0))


def _plan_refusals(world: World, start: float, end: float) -> None:
    """In some schedules, the broker refuses every message for a while, once."""
    rng = random.Random(f"{world.seed}: refusals of every message")
    if rng.random() < 0.3:
        at, lasts_s = rng.uniform(start, end), rng.choice([0.1, 1.0, 5.0])
        world.agenda.at(at, partial(setattr, world.broker, "refuses_all", True))  # noqa: FBT003
        over = partial(setattr, world.broker, "refuses_all", False)  # noqa: FBT003
        world.agenda.at(min(at + lasts_s, end), over)


def _plan_stuck_queue(world: World, start: float, end: float) -> None:
    """In some schedules, a queue confirms nothing for a while, as one without its majority."""
    rng = random.Random(f"{world.seed}: a queue that confirms nothing")
    if rng.random() < 0.2:
        at, key = rng.uniform(start, end), rng.choice(["limited", "mirrored", "queue"])
        world.agenda.at(at, partial(setattr, world.broker, "stuck", key))
        world.agenda.at(min(at + rng.choice([1.0, 10.0]), end), world.broker.release)


def _faults(world: World) -> list[Action]:
    """Everything that may go wrong."""
    broker = world.broker
    flags = [
        *[(broker, "is_declared"), (broker, "is_bound"), (broker, "is_full")],
        *[(broker, "opens_slowly"), (world, "is_disk_full_for_verdicts")],
    ]
    return [
        *[world.cut, world.close_channels, world.go_mute, world.crash_broker],
        *[world.burn_fuse, world.burn_fuse, world.kill, world.close],
        *[world.jump, world.person_retries, world.flush],
        *[world.person_intervenes, world.person_decides_on_keys, world.intervene_before_commit],
        partial(_spell, world, broker.alarm, broker.calm),
        *[_spell_of(world, name) for name in ("is_disk_full", "is_locked")],
        *[partial(_toggle, world, owner, name) for owner, name in flags],
    ]


def _spell(world: World, begin: Action, end: Action) -> None:
    """Something that lasts for a while."""
    begin()
    world.agenda.after(world.rng.choice([0.05, 1.0, 10.0]), end)


def _spell_of(world: World, name: str) -> Action:
    def switch(is_on: bool) -> Action:  # noqa: FBT001
        return lambda: setattr(world, name, is_on)

    return partial(_spell, world, switch(True), switch(False))  # noqa: FBT003


def _toggle(world: World, owner: object, name: str) -> None:
    world.note(f"switched {name}")
    setattr(owner, name, not getattr(owner, name))


def _play(world: World) -> None:
    """Let it happen; then, with everything healed, it must run empty by itself."""
    while not world.is_ending:
        world.agenda.run_next()
    _run_empty(world)
    world.person_retries()  # not before: whatever others write has the relay look once more
    _run_empty(world)
    world.finish()


def _run_empty(world: World) -> None:
    end = world.agenda.now + DRAIN_MAX_S
    while not world.is_quiet:
        world.agenda.run_next()
        require(world.agenda.now < end, "it never runs empty")
        require(len(world.history) < HISTORY_MAX, "much happens, and it never runs empty")
