"""The pages: what is shown of an outbox, and what a form does.

Knows: which function of the command line or of ``outbox/admin`` each figure comes from, and the
templates. Must never know: SQL, cookies, how a change is made.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from reliablepub.cli.doctor.command import look_at
from reliablepub.cli.facts import Finding, Level
from reliablepub.cli.outbox.explain import told
from reliablepub.cli.outbox.listing import answer_of, as_listed
from reliablepub.cli.output import ago, count_of, size_of
from reliablepub.cli.watch.lookout import RATES_KEPT, Look, look
from reliablepub.cli.watch.page import page_of
from reliablepub.dashboard.changes import FILTERS, VERBS, BadForm, Change, Fields, selection_of
from reliablepub.dashboard.chart import HEIGHT, WIDTH, points
from reliablepub.dashboard.guard import Guard, Secrets
from reliablepub.errors import OutboxError, OutboxSealed
from reliablepub.outbox.admin.inspection import (
    Contents,
    read_contents,
    read_held_keys,
    read_original,
)
from reliablepub.outbox.admin.selection import (
    CONFIRMED,
    STATES,
    Selection,
    find,
    summed,
    with_tasks,
)
from reliablepub.outbox.admin.story import resolve, tell
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.entry import TRANSIENT
from reliablepub.printable import one_line, printable

EVERY_S: Final = 2.0
"""Seconds between two looks, however many browsers are open."""
_COUNTED_MAX: Final = 100_000
"""Stuck messages that are grouped without being asked, which takes a quarter of a second."""
_GROUPING: Final = 0.05
"""Most of a core that grouping them again may take."""
_PAGE: Final = 50
_HELD_MAX: Final = 20
_STUCK: Final = Selection(states=("waiting", "parked", "expired"))
_BODY_MAX: Final = 16_384


@dataclass
class Desk:
    """One outbox, as all browsers see it."""

    database: Database
    may_change: bool
    shows_bodies: bool
    keys: OutboxKeys | None = field(repr=False)
    known: Secrets
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _seen: Look | None = field(default=None, init=False)
    _at: float = field(default=0.0, init=False)
    _groups: list[dict[str, Any]] = field(default_factory=list, init=False)
    _group_at: float = field(default=0.0, init=False)

    def groups(self) -> list[dict[str, Any]]:
        """What is stuck, by state, destination and answer; some seconds old if there is much."""
        begun = time.monotonic()
        if begun >= self._group_at:
            self._groups = summed(self.database, _STUCK)
            self._group_at = time.monotonic() + (time.monotonic() - begun) / _GROUPING
        return self._groups

    def look(self) -> Look:
        """The newest snapshot; another one is taken at most every `EVERY_S`."""
        with self._lock:
            if self._seen is not None and time.monotonic() - self._at < EVERY_S / 2:
                return self._seen
            try:
                seen = look(self.database, self._seen, closely=True)
            except TRANSIENT as error:
                if self._seen is None:
                    raise
                return self._seen.unreachable(str(error))
            self._seen, self._at = seen, time.monotonic()
            return seen

    def now(self) -> dict[str, Any]:
        """What the first screen shows."""
        seen = self.look()
        most = max(map(max, seen.rates))
        stored, confirmed = zip(*seen.rates, strict=True)
        stuck = sum(seen.values[name] for name in _STUCK.states)
        return {
            "page": page_of(seen),
            "values": seen.values,
            "most": most,
            "stored": points(stored, most, RATES_KEPT),
            "confirmed": points(confirmed, most, RATES_KEPT),
            "latency": seen.values["latency"],
            "held": read_held_keys(self.database, limit=_HELD_MAX),
            "groups": self.groups() if stuck <= _COUNTED_MAX else None,
        }


class Pages:
    """The endpoints."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._templates = Environment(
            loader=PackageLoader("reliablepub.dashboard"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_finalized,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "ago": ago,
            "size": size_of,
            "line": lambda value: one_line(str(value)),
            "answer": answer_of,
            "json": partial(json.dumps, default=str, ensure_ascii=False),
        }
        self._templates.globals |= {"WIDTH": WIDTH, "HEIGHT": HEIGHT, "every_s": EVERY_S}

    def routes(self) -> list[BaseRoute]:
        """The address of each page."""
        static = StaticFiles(packages=[("reliablepub.dashboard", "static")])
        shown: list[BaseRoute] = [
            Route("/", self._shown(self._overview)),
            Route("/now", self._shown(self._now)),
            Route("/checks", self._shown(self._checks)),
            Route("/stuck", self._shown(self._stuck)),
            Route("/messages", self._shown(self._messages)),
            Route("/messages/{id:int}", self._shown(self._message)),
            Mount("/static", static),
        ]
        if not self._desk.may_change:
            return shown
        return [
            *shown,
            Route("/changes/preview", self._posted(self._preview), methods=["POST"]),
            Route("/changes", self._posted(self._made), methods=["POST"]),
        ]

    # ------------------------------------------------------------------ how a page is made

    def _shown(self, view: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """An endpoint, on a thread of its own, that says in the page why there is none."""

        def endpoint(request: Request) -> Response:
            try:
                return view(request)
            except BadForm as error:
                return self._page(request, "failed.html", 400, why=str(error))
            except OutboxError as error:
                return self._page(request, "failed.html", 503, why=str(error))

        return endpoint

    def _posted(self, view: Callable[[Request, Fields], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            text = (await request.body()).decode(errors="replace")
            fields = parse_qs(text, keep_blank_values=True)

            def answer() -> Response:
                try:
                    return view(request, fields)
                except (BadForm, OutboxError) as error:
                    # 200: htmx shows no other answer.
                    return self._page(request, "refused.html", why=str(error))

            return await run_in_threadpool(answer)

        return endpoint

    def _page(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:  # noqa: ANN401
        desk = self._desk
        text = self._templates.get_template(template).render(
            outbox=printable(desk.database.name),
            may_change=desk.may_change,
            form_token=desk.known.form_token(request.state.person),
            person=request.state.person,
            **values,
        )
        return HTMLResponse(text, status)

    # ------------------------------------------------------------------ what is shown

    def _overview(self, request: Request) -> Response:
        return self._page(request, "overview.html", **self._desk.now())

    def _now(self, request: Request) -> Response:
        return self._page(request, "now.html", **self._desk.now())

    def _stuck(self, request: Request) -> Response:
        return self._page(request, "stuck.html", groups=self._desk.groups())

    def _checks(self, request: Request) -> Response:
        found: list[Finding] = []
        look_at(self._desk.database, found)
        worst = sorted(found, key=lambda one: [*Level].index(one.level), reverse=True)
        return self._page(request, "checks.html", found=worst)

    def _messages(self, request: Request) -> Response:
        query = _query(request)
        if name := next(iter(query.get("name", ())), "").strip():
            ids = resolve(self._desk.database, name)
            rows = [row for id_ in ids if (row := dict(tell(self._desk.database, id_).message))]
            rows, following = [as_listed(row) for row in rows], None
        else:
            selection = replace(selection_of(query), after=_number(query, "after"))
            rows = find(self._desk.database, selection, limit=_PAGE + 1)
            following = rows[_PAGE - 1]["id"] if len(rows) > _PAGE else None
            rows = rows[:_PAGE]
        if self._desk.shows_bodies:
            rows = with_tasks(self._desk.database, rows)
        return self._page(request, "messages.html", **self._list(query, rows, following))

    def _list(
        self, query: Fields, rows: list[dict[str, Any]], following: int | None
    ) -> dict[str, Any]:
        kept = {name: values for name, values in query.items() if name != "after"}
        return {
            "rows": rows,
            "states": (*STATES, CONFIRMED),
            "filters": FILTERS,
            "verbs": VERBS,
            "query": {name: values[0] for name, values in kept.items()},
            "chosen": kept.get("state", []),
            "next": None
            if following is None
            else "?" + urlencode({**kept, "after": following}, doseq=True),
        }

    def _message(self, request: Request) -> Response:
        desk, id_ = self._desk, request.path_params["id"]
        story = tell(desk.database, id_)
        return self._page(
            request,
            "message.html",
            story=story,
            lines=told(story, desk.database, time.time()),
            verbs=VERBS,
            now=self._contents(read_contents, id_),
            original=self._contents(read_original, id_),
        )

    def _contents(
        self, read: Callable[[Database, int, OutboxKeys | None], Contents | None], id_: int
    ) -> dict[str, Any] | None:
        """Properties, headers and body, if this page may show them; and why not, if not."""
        if not self._desk.shows_bodies:
            return {"problem": "properties and bodies are not shown (--no-bodies)", "table": {}}
        try:
            found = read(self._desk.database, id_, self._desk.keys)
        except (OutboxError, OutboxSealed) as error:
            return {"problem": str(error), "table": {}}
        if found is None:
            return None
        table = dict(found.properties) | {
            f"header {name}": json.dumps(value, default=str, ensure_ascii=False)
            for name, value in found.headers.items()
        }
        text = found.text
        return {
            "problem": found.problem,
            "table": {} if found.is_sealed else table,
            "bytes": len(found.body),
            "text": None if text is None or found.is_sealed else text[:_BODY_MAX],
            "hex": None if found.is_sealed or text is not None else found.body[:1024].hex(" "),
        }

    # ------------------------------------------------------------------ what is changed

    def _preview(self, request: Request, fields: Fields) -> Response:
        change = Change.of(fields, request.state.person)
        count, effect = change.foreseen(self._desk.database, self._desk.keys)
        return self._page(
            request,
            "preview.html",
            verb=VERBS[change.verb],
            words=f"{count_of(effect.changed, 'message')} of {count}",
            effect=effect,
            fields=[(name, value) for name, values in fields.items() for value in values],
        )

    def _made(self, request: Request, fields: Fields) -> Response:
        change = Change.of(fields, request.state.person)
        effect = change.made(self._desk.database, self._desk.keys)
        return self._page(
            request,
            "done.html",
            verb=VERBS[change.verb],
            words=count_of(effect.changed, "message"),
            effect=effect,
        )


def _finalized(value: object) -> object:
    """Escape the control characters of a text; lines and tabs stay."""
    if not isinstance(value, str) or value.isprintable():
        return value  # as markup is, after the templates' own lines
    lines = ("\t".join(map(printable, line.split("\t"))) for line in value.split("\n"))
    return type(value)("\n".join(lines))


def _query(request: Request) -> dict[str, list[str]]:
    query: dict[str, list[str]] = {}
    for name, value in request.query_params.multi_items():
        if value.strip():
            query.setdefault(name, []).append(value)
    return query


def _number(query: Mapping[str, list[str]], name: str) -> int | None:
    (text,) = query.get(name, [""])[:1]
    return int(text) if text.isascii() and text.isdecimal() else None


def new_app(desk: Desk, *, user_header: str | None, hosts: frozenset[str]) -> Starlette:
    """The application, for one outbox."""
    guard = Middleware(Guard, known=desk.known, user_header=user_header, hosts=hosts)
    return Starlette(routes=Pages(desk).routes(), middleware=[guard])
