"""That a message costs the same among ten or ten million, and that memory is bounded by the window.

Each figure is taken in a process of its own (`tests.speed.alone`); rounds are interleaved. What is
told is the CPU time per message, which a busy machine disturbs least. Every test prints its
table, leaves its figures in build/speed as lines of JSON, and draws all figures there are: the long
form into docs/, the short one beside the figures.

    pytest -m bench -s tests/speed/test_flat.py     # two minutes
    pytest -m soak -s tests/speed/test_flat.py      # twenty minutes
"""

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tests.amqp_probe import AmqpProbe, unique
from tests.speed import alone
from tests.speed.alone import ROOT, WARM_UP, Figure, Job
from tests.speed.measuring import Goal, check, print_table, spaced
from tests.speed.panels import Panel, draw

pytestmark = [pytest.mark.rabbit, pytest.mark.timeout(3_600)]

QUEUES = 8
NOWHERE = "amqp://guest:guest@127.0.0.1:9/%2F"  # the port of "discard", where nobody listens
FIGURES = ROOT / "build" / "speed"
FOREVER = 1_000_000_000
FILL_US_AT_LAST = 20_000
"""Of a backlog, the last so many are those whose price is told."""


@dataclass(frozen=True)
class Form:
    """How long it may take.

    Attributes:
        counts: how many messages in all, one figure at each.
        counts_last_s: or as many as that time allows.
        backlogs: how many messages are in the outbox already.
        lasts_s: every other run.
        picture: where it is drawn.
    """

    name: str
    rounds: int
    lasts_s: float
    counts: list[int]
    counts_last_s: float
    backlogs: list[int]
    picture: Path


SHORT = Form(
    name="short",
    rounds=1,
    lasts_s=1.0,
    counts=[1, 10, 100, 1_000, 10_000, 30_000],
    counts_last_s=20.0,
    backlogs=[10_000, 50_000],
    picture=FIGURES / "flat.svg",
)
LONG = Form(
    name="long",
    rounds=3,
    lasts_s=2.0,
    counts=[10**n for n in range(8)],
    counts_last_s=540.0,
    backlogs=[10_000, 100_000, 1_000_000, 5_000_000],
    picture=ROOT / "docs" / "flat.svg",
)


@dataclass(frozen=True)
class Point:
    """A figure, at its place in a picture."""

    line: str
    x: int
    figure: Figure


Subject = Mapping[str, Sequence[Point]]


@pytest.fixture(
    params=[
        pytest.param(SHORT, id="short", marks=pytest.mark.bench),
        pytest.param(LONG, id="long", marks=pytest.mark.soak),
    ]
)
def form(request: pytest.FixtureRequest) -> Form:
    chosen: Form = request.param
    return chosen


@pytest.fixture
def queues(rabbitmq: AmqpProbe) -> list[str]:
    """Full from the first second on, so that the broker does not change meanwhile."""
    bounds = {"x-max-length": 1_000, "x-max-length-bytes": 8 * 1024 * 1024}
    return [rabbitmq.declare_queue(arguments=bounds) for _ in range(QUEUES)]


@pytest.fixture
def job(rabbitmq: AmqpProbe, queues: list[str], tmp_path: Path, form: Form) -> Callable[..., Job]:
    """A job of the form's duration, with an outbox of its own."""
    numbers = itertools.count()

    def job(**changes: object) -> Job:
        plain = Job(
            kind="publish",
            url=rabbitmq.url,
            outbox=str(tmp_path / f"{next(numbers)}.db"),
            keys=queues,
            marks=[WARM_UP, FOREVER],
            lasts_s=form.lasts_s,
        )
        return replace(plain, **changes)  # type: ignore[arg-type]

    return job


def test_how_many(form: Form, job: Callable[..., Job]) -> None:
    figures = alone.run(job(marks=form.counts, lasts_s=form.counts_last_s, body_bytes=100))
    points = [Point("", figure.messages, figure) for figure in figures]
    many = [point for point in points if point.x >= 1_000]
    grown = many[-1].figure.memory_mib - many[0].figure.memory_mib
    tell(form, "count", points)
    check([flat("messages", many), Goal("MiB more at the end", grown, 16.0, 64.0, is_most=True)])


def test_how_many_wait_already(form: Form, job: Callable[..., Job]) -> None:
    outbox = job().outbox
    points: list[Point] = []
    open_ = 0
    for backlog in form.backlogs:
        missing = backlog - open_
        marks = [max(1, missing - FILL_US_AT_LAST), missing] if missing > 1 else [1]
        filling = job(kind="store", url=NOWHERE, outbox=outbox, marks=marks, lasts_s=3_600.0)
        filled = alone.run(replace(filling, body_bytes=100))[-1]
        points.append(Point("stored", backlog, filled))
        draining = job(kind="drain", outbox=outbox, marks=[min(30_000, backlog * 9 // 10)])
        drained = alone.run(draining)[-1]
        points.append(Point("sent", backlog, drained))
        open_ = backlog - drained.messages
    tell(form, "backlog", points)
    for line in ("stored", "sent"):
        check([flat(f"{line}, backlog", [point for point in points if point.line == line])])


def test_how_wide_the_window_is(form: Form, job: Callable[..., Job]) -> None:
    windows = [10, 30, 100, 300, 1_000, 3_000, 10_000]
    plain = partial(job, lasts_s=2 * form.lasts_s)  # to fill the widest
    points = in_rounds(form, {window: partial(plain, window=window) for window in windows})
    tell(form, "window", points)
    wide = [point for point in points if point.x >= 300]
    least, most = points[0].figure.memory_mib, points[-1].figure.memory_mib
    grown = (most - least) / (windows[-1] / 1_024)
    check(
        [
            flat("window", wide),
            Goal("memory: windows of 1 KiB messages", grown, 8.0, 16.0, is_most=True),
        ]
    )


def test_how_large_bodies_are(form: Form, job: Callable[..., Job]) -> None:
    sizes = [0, 64, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576]
    jobs = {size: partial(job, body_bytes=size, marks=[50, FOREVER]) for size in sizes}
    points = in_rounds(form, jobs)
    tell(form, "body", points)
    cpu = {point.x: point.figure.cpu_us for point in points}
    a_kib = cpu[1_048_576] / 1_024 / (cpu[65_536] / 64)
    check(
        [
            Goal("1 KiB / no body", cpu[1_024] / cpu[0], 1.5, 3.0, is_most=True),
            Goal("a KiB of 1 MiB / a KiB of 64 KiB", a_kib, 1.5, 3.0, is_most=True),
        ]
    )


def test_how_many_destinations(
    form: Form, job: Callable[..., Job], rabbitmq: AmqpProbe, queues: list[str]
) -> None:
    exchange = rabbitmq.declare_exchange(kind="topic")
    for number, queue in enumerate(queues):
        rabbitmq.bind(queue, exchange, f"{number}.#")
    keys = {
        many: [f"{number % QUEUES}.{number}" for number in range(many)]
        for many in (1, 8, 64, 256, 1_000)
    }
    jobs = {many: partial(job, exchange=exchange, keys=one) for many, one in keys.items()}
    points = in_rounds(form, jobs)
    tell(form, "destinations", points)
    check([flat("destinations", points)])


def test_how_many_returns_are_in_flight(form: Form, job: Callable[..., Job]) -> None:
    windows = [10, 100, 1_000, 10_000]
    nowhere = [unique("nowhere")]
    plain = partial(job, keys=nowhere, lasts_s=3 * form.lasts_s)  # to fill the window
    jobs = {window: partial(plain, window=window) for window in windows}
    points = in_rounds(form, jobs)
    tell(form, "returns", points)
    check([flat("returns", [point for point in points if point.x >= 100])])


def in_rounds(form: Form, jobs: Mapping[int, Callable[[], Job]]) -> list[Point]:
    """The median of each, by CPU time; what comes before the last mark is warming up."""
    figures: dict[int, list[Figure]] = {x: [] for x in jobs}
    for _ in range(form.rounds):
        for x, make in jobs.items():
            figures[x].append(alone.run(make())[-1])
    return [
        Point("", x, sorted(taken, key=lambda one: one.cpu_us)[len(taken) // 2])
        for x, taken in figures.items()
    ]


def flat(what: str, points: Sequence[Point]) -> Goal:
    """The dearest of them is hardly dearer than their median."""
    costs = [point.figure.cpu_us for point in points]
    growth = max(costs) / statistics.median(costs)
    return Goal(f"{what}: dearest / median", growth, 1.5, 4.0, is_most=True)


def tell(form: Form, subject: str, points: Sequence[Point]) -> None:
    """Print, keep, and draw."""
    print_table(
        (subject, "", "µs of CPU time", "a second", "MiB", "in flight", "s to open"),
        [
            (
                spaced(point.x),
                point.line,
                f"{point.figure.cpu_us:.0f}",
                spaced(point.figure.per_second),
                f"{point.figure.memory_mib:.0f}",
                spaced(point.figure.in_flight),
                f"{point.figure.opened_s:.1f}",
            )
            for point in points
        ],
    )
    FIGURES.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(point)) + "\n" for point in points]
    (FIGURES / f"{form.name}-{subject}.jsonl").write_text("".join(lines))
    draw(form.picture, list(panels(form)))


def panels(form: Form) -> Iterator[Panel]:
    """A picture of whatever figures there are."""
    for subject, title, is_flat in (
        ("count", "µs a message: messages so far", False),
        ("backlog", "µs a message: messages that wait already", True),
        ("window", "µs a message: window", True),
        ("body", "µs a message: bytes of the body", False),
        ("destinations", "µs a message: destinations", True),
        ("returns", "µs a returned message: returns in flight", True),
    ):
        points = kept(form, subject)
        if points:
            yield Panel(title, lines(points, "cpu_us"), is_flat=is_flat)
    count, window = kept(form, "count"), kept(form, "window")
    if count:
        yield Panel("MiB of memory: messages so far", lines(count, "memory_mib"))
    if window:
        memory = lines(window, "memory_mib")[""]
        bodies = [(point.x, point.x / 1_024) for point in window]
        yield Panel("MiB of memory: window", {"in all": memory, "bodies in the window": bodies})


def lines(points: Sequence[Point], field: str) -> dict[str, list[tuple[float, float]]]:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        by_name.setdefault(point.line, []).append((point.x, getattr(point.figure, field)))
    return by_name


def kept(form: Form, subject: str) -> list[Point]:
    """The figures of the last run."""
    path = FIGURES / f"{form.name}-{subject}.jsonl"
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [Point(row["line"], row["x"], Figure(**row["figure"])) for row in rows]
