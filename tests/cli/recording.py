"""A recording of `reliablepub watch` and `outbox explain`: an animated picture for the documents.

Run as `python -m tests.cli.recording`; it writes docs/watch.svg in a minute. A publisher sends to
the fake broker, which crashes and comes back; then messages are sent that no queue is bound for.
The commands themselves draw each frame, a second apart. The picture needs no fonts, scripts or
network: CSS shows one frame after the other, and a reader who prefers no motion sees the last one.
"""

import io
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.text import Text

from reliablepub import Outbox, Publisher, RetryPolicy
from reliablepub.cli.watch.lookout import look
from reliablepub.cli.watch.page import page_of
from reliablepub.cli.watch.screen import draw
from reliablepub.outbox.opening import outbox_at
from reliablepub.testing import FakeBroker

PICTURE = Path(__file__).parents[2] / "docs" / "watch.svg"
COLUMNS, LINES = 84, 24
CHARACTER, LINE, MARGIN = 8.0, 17, 14
SCENES = (  # seconds, and what begins with them
    (8, "start"),
    (8, "crash"),
    (8, "back"),
    (8, "refunds"),
)
COLORS = {"red": "#f28b82", "green": "#81c995", "yellow": "#fdd663"}
Frame = list[str]
"""The lines of one screen, as SVG."""


def main() -> None:
    """Record, and write the picture."""
    with TemporaryDirectory() as folder:
        frames = list(record(Path(folder) / "shop.db"))
    frames = [[line.replace(f"{folder}/", "") for line in frame] for frame in frames]
    PICTURE.write_text(picture(frames))
    sys.stderr.write(f"{PICTURE}: {len(frames)} frames, {PICTURE.stat().st_size // 1024} KiB\n")


def record(path: Path) -> Iterator[Frame]:
    """The screens of `watch`, a second apart, and then the answer of `explain`."""
    ended = threading.Event()
    with FakeBroker() as broker:
        broker.declare_exchange("orders", "topic")
        broker.declare_queue("invoices")
        broker.bind("invoices", "orders", "order.#")
        with Publisher(broker.url, outbox=path, retry=RetryPolicy.prompt()) as publisher:
            shop = threading.Thread(target=_sell, args=(publisher, ended))
            shop.start()
            try:
                yield from _watched(path, broker, publisher)
            finally:
                ended.set()
                shop.join()
        refund = Outbox(path).parked()[0].id
    yield from _explained(path, refund)


def _watched(path: Path, broker: FakeBroker, publisher: Publisher) -> Iterator[Frame]:
    seen = None
    with closing(outbox_at(path)) as database:
        for seconds, scene in SCENES:
            if scene == "crash":
                broker.crash()
            elif scene == "back":
                broker.start()
            elif scene == "refunds":
                for number in range(3):
                    body = b'{"refund": %d}' % number
                    publisher.publish(body, exchange="orders", routing_key="refund.created")
            for _ in range(seconds):
                time.sleep(1)
                seen = look(database, seen, closely=True)
                yield lines(draw(page_of(seen), width=COLUMNS, height=LINES, hint="q ends it"))


def _sell(publisher: Publisher, ended: threading.Event) -> None:
    """Publish some orders now and then, also while the broker is away."""
    number = 0
    while not ended.wait(0.02):
        for _ in range(6):
            number += 1
            body = b'{"order": %d}' % number
            publisher.publish(body, exchange="orders", routing_key="order.created")


def _explained(path: Path, id_: int) -> Iterator[Frame]:
    command = ["reliablepub", "outbox", "explain", str(id_), "--outbox", path.name]
    prompt = Text(f"$ {' '.join(command)}", style="bold")
    yield lines(prompt)
    program = Path(sys.executable).with_name("reliablepub")
    said = subprocess.run(
        [program, *command[1:]], cwd=path.parent, capture_output=True, text=True, check=True
    )
    answer = lines(Text.assemble(prompt, "\n", said.stdout.rstrip()))
    yield from [answer] * 10


def lines(screen: RenderableType) -> Frame:
    """What a terminal shows, line by line."""
    console = Console(
        width=COLUMNS,
        height=LINES,
        file=io.StringIO(),
        color_system="standard",
        force_terminal=True,
    )
    rows = console.render_lines(screen, pad=False)[:LINES]
    return ["".join(_spans(row)).rstrip() for row in rows]


def _spans(row: list[Segment]) -> Iterator[str]:
    for text, style, _ in Segment.simplify(row):
        words = escape(text, quote=False)
        name = style.color.name if style is not None and style.color is not None else ""
        looks = f' fill="{COLORS[name]}"' if name in COLORS else ""
        if style is not None and style.bold:
            looks += ' font-weight="bold"'
        if style is not None and style.dim:
            looks += ' opacity=".6"'
        yield f"<tspan{looks}>{words}</tspan>" if looks else words


def picture(frames: list[Frame]) -> str:
    """All frames in one SVG, each seen for a second."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, LINES * LINE + 2 * MARGIN
    view = f"{-MARGIN} {-MARGIN} {width:g} {height:g}"
    share = 100 / len(frames)
    label = "reliablepub watch through a crash of the broker, then outbox explain"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}"',
        f'role="img" aria-label="{label}" xml:space="preserve">',
        "<style>",
        "text{font:13.3px ui-monospace,Menlo,Consolas,monospace;fill:#e8eaed;white-space:pre}",
        f"g{{visibility:hidden;animation:f {len(frames)}s step-end infinite}}",
        f"@keyframes f{{0%{{visibility:visible}}{share:.3f}%{{visibility:hidden}}}}",
        "@media(prefers-reduced-motion){g{animation:none}g:last-of-type{visibility:visible}}",
        "</style>",
        f'<rect x="{-MARGIN}" y="{-MARGIN}" width="{width:g}" height="{height:g}" fill="#202124"/>',
    ]
    for number, frame in enumerate(frames):
        parts.append(f'<g style="animation-delay:{number}s">')
        parts += (
            f'<text y="{LINE * (row + 0.8):g}">{line}</text>'
            for row, line in enumerate(frame)
            if line
        )
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
