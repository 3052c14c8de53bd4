"""Health checks and metrics over HTTP.

Knows: HTTP, `Status`. Must never know: how a publisher is opened, or what a metric means.

``/live``: the relay has not failed, and its thread takes turns. If not, only a restart helps.
``/ready``: messages can be stored: the outbox has no trouble, and its relay takes turns or stands
by. If not, an operator or time may help, but no restart. A broker that is away is no reason: its
outage would become one of the application that is taken out of service.
``/metrics``: the exposition that the caller passes in.

``/live`` and ``/ready`` wait for nothing: they look at the age of the relay's last turn. A relay
that waits for a lock of SQLite's, or for a slow disk, is live for `LIVE_WITHIN_S` seconds.

Every client that reaches the port may send requests. So requests have a deadline and a maximum
size, and the number of connections is limited. Replies of the broker are not shown, since they may
name users and hosts; they are in the log and in ``reliablepub watch``.
"""

from __future__ import annotations

import io
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Final, Self, TypeAlias

from reliablepub.relay.status import Link, Status

Exposition: TypeAlias = tuple[str, bytes]
"""Content type and body."""

LIVE_WITHIN_S: Final = 30.0
"""Seconds without a turn after which a relay is not live; an idle relay takes at least two
a second. One turn may wait 5 s for SQLite's write lock, and longer for a disk that hangs."""
READY_WITHIN_S: Final = 10.0
"""Seconds without a turn after which a relay is not ready."""
CONNECTIONS_MAX: Final = 16
"""Maximum number of connections. A new one replaces the one whose request has been incomplete for
longest, or whose answer has been unread for longest; it is refused if there is neither."""
REQUEST_WITHIN_S: Final = 5.0
"""Seconds for a complete request to arrive, and again for the client to read the answer."""
REQUEST_BYTES_MAX: Final = 8_192
"""Maximum size of a request's head."""
_FAILED: Final = "the relay has failed; the log has the cause"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


class Health:
    """The health checks, without HTTP."""

    def __init__(self, look: Callable[[], Status]) -> None:
        self._look = look

    def live(self) -> tuple[bool, dict[str, object]]:
        """Whether the relay has not failed, and began its last turn within `LIVE_WITHIN_S`."""
        status = self._look()
        reasons = [_FAILED] if status.link is Link.FAILED else _hanging(status, LIVE_WITHIN_S)
        return not reasons, {"live": not reasons, "reasons": reasons}

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Whether messages can be stored now, and if not, why."""
        status = self._look()
        reasons = [status.trouble] if status.trouble else []
        if status.link is Link.FAILED:
            reasons.append(_FAILED)
        else:
            reasons += _hanging(status, READY_WITHIN_S)
        return not reasons, {
            "ready": not reasons,
            "reasons": reasons,
            "link": status.link.value,
            "open": status.open,
            "in_flight": status.in_flight,
            "parked": status.counters.parked,
        }


def _hanging(status: Status, within_s: float) -> list[str]:
    if status.turn_age_s < within_s:
        return []
    return [f"the relay has taken no turn for {status.turn_age_s:.0f} s"]


class HealthServer:
    """HTTP server for health checks and metrics, on its own threads within the ``with`` block."""

    def __init__(
        self, host: str, port: int, health: Health, expose: Callable[[str], Exposition] | str
    ) -> None:
        self._server = _Server((host, port), health, expose)
        bound = self._server.server_port  # if it is 0, the system chooses a free one
        self.url: Final = f"http://{f'[{host}]' if ':' in host else host}:{bound}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="reliablepub-health", daemon=True
        )

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving, and close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, address: tuple[str, int], health: Health, expose: Callable[[str], Exposition] | str
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.health = health
        self.expose = expose
        self._lock = threading.RLock()
        self._reading: dict[socket.socket, None] = {}  # oldest first
        self._answering: dict[socket.socket, None] = {}
        self._writing: dict[socket.socket, None] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, without the base's look-up of the host's name, which would wait for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's
        """Print what is a bug; a client that resets its connection is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - the base's
        """Answer a connection on a new thread, within `CONNECTIONS_MAX`."""
        with self._lock:
            if len(self._reading) + len(self._answering) + len(self._writing) >= CONNECTIONS_MAX:
                # A thread that is making an answer cannot be ended, so it counts until it is done.
                oldest = next(itertools.chain(self._reading, self._writing), None)
                if oldest is None:
                    self.shutdown_request(request)
                    return
                self._forget(oldest)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes up and ends
            self._reading[request] = None
        super().process_request(request, client_address)

    def has_read(self, request: socket.socket) -> None:
        """Note that the request of a connection is complete."""
        with self._lock:
            if request in self._reading:
                del self._reading[request]
                self._answering[request] = None

    def has_answer(self, request: socket.socket) -> None:
        """Note that the answer to a request is made, and only has to be sent."""
        with self._lock:
            if request in self._answering:
                del self._answering[request]
                self._writing[request] = None

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 - the base's
        """End a connection."""
        super().shutdown_request(request)
        with self._lock:
            self._forget(request)

    def _forget(self, connection: socket.socket) -> None:
        for connections in (self._reading, self._answering, self._writing):
            connections.pop(connection, None)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: _Server
    server_version = "reliablepub"
    sys_version = ""

    def setup(self) -> None:
        """Read the complete request before parsing it, so that the deadline covers all of it."""
        super().setup()
        self.rfile = io.BytesIO(self._request())
        self.connection.settimeout(REQUEST_WITHIN_S)
        self.server.has_read(self.connection)

    def _request(self) -> bytes:
        """The head of the request; empty if it does not arrive in time, or is too long."""
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
        """Answer a request."""
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
        """Log nothing: a line for each scrape would drown the rest of the log."""

    def _answer_json(self, is_well: bool, values: dict[str, object]) -> None:  # noqa: FBT001 - as given
        status = HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, _JSON, json.dumps(values).encode() + b"\n")

    def _answer_metrics(self) -> None:
        expose = self.server.expose
        if isinstance(expose, str):  # says why there are no metrics
            self._answer(HTTPStatus.NOT_IMPLEMENTED, _TEXT, f"{expose}\n".encode())
            return
        try:
            answer = expose(self.headers.get("Accept", ""))
        except Exception as error:  # noqa: BLE001 - a collector of the application can raise anything
            text = f"the metrics cannot be collected: {type(error).__name__}\n"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, _TEXT, text.encode())
        else:
            self._answer(HTTPStatus.OK, *answer)

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.server.has_answer(self.connection)
        with suppress(OSError):  # the client does not read the answer
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
