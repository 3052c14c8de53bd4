"""Who may use the page: a token, a cookie, the name of the host, and a token in each form.

Knows: HTTP headers, cookies and secrets. Must never know: outboxes, or what a page shows.

A page in the browser of a person on call can be attacked by other pages: they may guess its
address (so it needs a cookie that only the printed URL gives), send it forms (so each form has a
token of its own, and the cookie is ``SameSite=Strict``), or give their own name the address
127.0.0.1 (so the host is checked). What messages hold is shown as text, and the
Content-Security-Policy allows no script and no style but those of this page.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_PERSON_MAX: Final = 200


@dataclass(frozen=True)
class Secrets:
    """What a browser must know to use the page."""

    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    def form_token(self, person: str) -> str:
        """The token in each form that is shown to a person."""
        return hmac.new(self.cookie.encode(), person.encode(), sha256).hexdigest()


class Guard:
    """ASGI middleware: lets requests of the person on call pass, and adds headers to each answer.

    Args:
        app: the application.
        known: the secrets of this process.
        user_header: name of the header in which a proxy, which alone reaches this process, tells
            who has logged in there; None for the token.
        hosts: names of this host, beside those of the loopback interface.
    """

    def __init__(
        self, app: ASGIApp, known: Secrets, user_header: str | None, hosts: frozenset[str]
    ) -> None:
        self._app = app
        self._known = known
        self._user_header = user_header
        self._hosts = _LOOPBACK | hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the application answer it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        request = Request(scope, receive)
        answer = self._refusal(request)
        if answer is None:
            answer = await self._forged(request)
        return await (self._app if answer is None else answer)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The answer to a request that shows no secret, or that shows the token; else None."""
        if (urlsplit(f"//{request.headers.get('host', '')}").hostname or "") not in self._hosts:
            return _refused("this page has another name: open the address that was printed")
        if self._user_header is None:
            request.state.person = ""
            return self._refusal_by_cookie(request)
        request.state.person = request.headers.get(self._user_header, "")[:_PERSON_MAX]
        if not request.state.person:
            return _refused(f"the proxy has sent no {self._user_header}, so no user is logged in")
        return None

    def _refusal_by_cookie(self, request: Request) -> Response | None:
        name = f"reliablepub-{request.url.port or 80}"  # cookies are shared by all ports of a host
        token = request.query_params.get("token")
        if token is not None:
            if not _is(token, self._known.token):
                return _refused("the token is wrong: open the address that was printed")
            answer = RedirectResponse(request.url.remove_query_params("token"), 303)
            answer.set_cookie(name, self._known.cookie, httponly=True, samesite="strict")
            return answer
        if not _is(request.cookies.get(name, ""), self._known.cookie):
            return _refused("open the address that was printed, with its token")
        return None

    async def _forged(self, request: Request) -> Response | None:
        """The answer to a form that this page has not made; None if it has, or if there is none."""
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return _refused("the form comes from another page")
        wanted = self._known.form_token(request.state.person)
        if not _is(request.headers.get("x-form-token", ""), wanted):
            return _refused("the form does not belong to this page: load the page again")
        return None


def _is(given: str, wanted: str) -> bool:
    """Whether a secret is the right one, in the same time for each wrong one."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _refused(why: str) -> Response:
    return PlainTextResponse(f"{why}\n", 403)
