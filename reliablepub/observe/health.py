"""Health over HTTP: whether a relay turns, whether it reaches the broker, and its metrics.

Knows: HTTP, `Status`. Must never know: how a publisher is opened, what a metric means.

``/live``: the relay has not failed, and its thread takes turns; if not, only a restart helps.
``/ready``: and it has a broker that takes messages; if not, a person or time may help, and a
restart will not. ``/metrics`` is what whoever starts this server passes in.

Anyone who reaches the port can ask. So a request has a deadline and a size, there are so many
connections at most, and no words of the broker are shown, which may name users and hosts: they are
in the log, and in ``reliablepub watch``.
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from reliablepub.relay.status import Link, Status

Exposition: TypeAlias = tuple[str, bytes]
"""A content type, and what is of it."""

TURN_WITHIN_S: Final = 10.0
"""A relay that takes no turn for so long is not alive; an idle one takes twenty a second."""
CONNECTIONS_MAX: Final = 16
"""At once; beyond it the one that has been sending its request for longest gives way."""
REQUEST_WITHIN_S: Final = 5.0
"""A request has arrived by then, however it trickles; and as long for the answer to be taken."""
REQUEST_BYTES_MAX: Final = 8_192
_LOOK_S: Final = 0.02
_FAILED: Final = "the relay has failed; the log tells why"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class Health:
    """Answers in words and truth values, without HTTP.

    Args:
        look: the status now.
        turn_within_s: how long a turn is waited for.
    """

    def __init__(self, look: Callable[[], Status], *, turn_within_s: float = TURN_WITHIN_S) -> None:
        self._look = look
        self._turn_within_s = turn_within_s

    def live(self) -> tuple[bool, dict[str, object]]:
        """Whether the relay takes a turn, for which it is given a moment."""
        turns = self._look().turns
        give_up_at = time.monotonic() + self._turn_within_s
        while (status := self._look()).turns == turns:
            if status.link is Link.FAILED:
                return False, {"live": False, "reasons": [_FAILED]}
            if time.monotonic() >= give_up_at:
                reason = f"the relay has taken no turn for {self._turn_within_s:g} s"
                return False, {"live": False, "reasons": [reason]}
            time.sleep(_LOOK_S)
        return True, {"live": True, "reasons": []}

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Whether messages get through to the broker now, and what is in the way."""
        status = self._look()
        reasons = _in_the_way(status)
        return not reasons, {
            "ready": not reasons,
            "reasons": reasons,
            "link": status.link.value,
            "open": status.open,
            "in_flight": status.in_flight,
            "parked": status.counters.parked,
        }


def _in_the_way(status: Status) -> list[str]:
    match status.link:
        case Link.CONNECTED:
            return [status.trouble] if status.trouble else []
        case Link.FAILED:
            return [_FAILED]
        case Link.BLOCKED:
            return ["blocked by the broker"]
        case _:
            return ["not connected to the broker"]


class HealthServer:
    """Serves them, from threads of its own, between ``with`` and its end.

    Args:
        host: which address to listen on.
        port: likewise; 0 for any.
        health: answers.
        expose: metrics, given what the client accepts; or a text that says why there are none.

    Attributes:
        url: where it listens.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, health: Health, expose: Callable[[str], Exposition] | str
    ) -> None:
        self._server = _Server((host, port), health, expose)
        bound = self._server.server_port
        self.url: Final = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="reliablepub-health", daemon=True
        )

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        address: tuple[str, int],
        health: Health,
        expose: Callable[[str], Exposition] | str,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.health = health
        self.expose = expose
        self._lock = threading.RLock()
        self._reading: dict[socket.socket, None] = {}  # in the order in which they came
        self._answering: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's
        """Answer on a thread of its own, if there may be one more."""
        with self._lock:
            if len(self._reading) + len(self._answering) >= CONNECTIONS_MAX:
                oldest = next(iter(self._reading), None)
                if oldest is None:
                    self.shutdown_request(request)
                    return
                del self._reading[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes, and ends
            self._reading[request] = None
        super().process_request(request, client_address)

    def has_read(self, request: socket.socket) -> None:
        """The request of this connection is there."""
        with self._lock:
            if request in self._reading:
                del self._reading[request]
                self._answering.add(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - the base's
        """The connection ends."""
        super().shutdown_request(request)
        with self._lock:
            self._reading.pop(request, None)
            self._answering.discard(request)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    server_version = "reliablepub"
    sys_version = ""

    def setup(self) -> None:
        """Read all of the request, before any of it is looked at."""
        super().setup()
        self.rfile = io.BytesIO(self._request())
        self.connection.settimeout(REQUEST_WITHIN_S)
        self.server.has_read(self.connection)

    def _request(self) -> bytes:
        """The head of the request; nothing where it does not come in time, or is too long."""
        until = time.monotonic() + REQUEST_WITHIN_S
        head = b""
        try:
            while b"\r\n\r\n" not in head and b"\n\n" not in head:
                left_s = until - time.monotonic()
                if left_s <= 0 or len(head) >= REQUEST_BYTES_MAX:
                    return b""
                self.connection.settimeout(left_s)
                block = self.connection.recv(REQUEST_BYTES_MAX - len(head))
                if not block:
                    return b""
                head += block
        except OSError:
            return b""
        return head

    def do_GET(self) -> None:
        """Answer."""
        match self.path.partition("?")[0]:
            case "/live":
                self._answer_json(*self.server.health.live())
            case "/ready":
                self._answer_json(*self.server.health.ready())
            case "/metrics":
                self._answer_metrics()
            case _:
                text = b"there are /live, /ready and /metrics\n"
                self._answer(HTTPStatus.NOT_FOUND, _TEXT, text)

    do_HEAD = do_GET  # noqa: N815 - the base's way

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing: one line for each scrape would hide the others."""

    def _answer_json(self, is_well: bool, values: dict[str, object]) -> None:  # noqa: FBT001 - as given
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, _JSON, json.dumps(values).encode() + b"\n")

    def _answer_metrics(self) -> None:
        expose = self.server.expose
        if isinstance(expose, str):
            self._answer(HTTPStatus.NOT_IMPLEMENTED, _TEXT, f"{expose}\n".encode())
        else:
            self._answer(HTTPStatus.OK, *expose(self.headers.get("Accept", "")))

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        with suppress(OSError):  # a client that takes no answer
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
