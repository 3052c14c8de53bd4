"""The control port: the methods of `FakeBroker` over HTTP, for tests in any language.

This module knows HTTP and JSON, and which request is which method. It must never know AMQP, or the
inside of the broker.

A page in a browser must not control a broker on the same machine. So requests with an `Origin` are
refused, and so are those to a host that is neither the broker's nor loopback (a rebound DNS name).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from reliablepub.testing import as_json
from reliablepub.testing.faults import fault_of
from reliablepub.testing.options import Permissions

if TYPE_CHECKING:
    from reliablepub.testing.broker import FakeBroker

Action: TypeAlias = Callable[..., object]
"""Carries out a request for a broker, with the arguments and, if the path has one, a name."""

REQUEST_MAX_BYTES: Final = 64 * 1024 * 1024
"""Largest body of a request."""
REQUEST_WITHIN_S: Final = 30.0
"""Longest wait for the next bytes of a request, in seconds."""
PUBLISHED_LIMIT: Final = 1000
"""Messages in an answer, unless the request asks for another number."""
_WAIT_S: Final = 5.0
_POLL_S: Final = 0.05
"""How often the server looks whether it is to stop, in seconds."""


class RefusedError(Exception):
    """A request that is not carried out; the text says why."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Arguments:
    """The arguments of a request: of its query and of its JSON object; each is taken once."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named

    def take(self, name: str, kind: type, default: object = ...) -> Any:  # noqa: ANN401 - of `kind`
        """An argument.

        Raises:
            RefusedError: It is of another type, or there is none and no default.
        """
        value = self._named.pop(name, default)
        if value is ...:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{name!r} is missing")
        if value is default:
            return value
        if isinstance(value, str) and kind in (int, float):  # of the query
            with suppress(ValueError):
                value = kind(value)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{name!r} must be {_KINDS[kind]}")
        return value

    def rest(self) -> dict[str, Any]:
        """All that is not taken; nothing is left."""
        rest, self._named = self._named, {}
        return rest

    def expect_none(self) -> None:
        """Refuse an argument that was not taken.

        Raises:
            RefusedError: There is one.
        """
        if self._named:
            name = min(self._named)
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"there is no argument {name!r} here")


_KINDS: Final = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "an array",
    str: "a string",
}


class ControlServer:
    """The control port of a broker. Serves within its ``with`` block, on own threads.

    Args:
        broker: The broker, started or not.
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        is_remote: Whether requests may name any host.

    Attributes:
        url: URL of the server.

    Raises:
        OSError: The server cannot listen on this address.
    """

    def __init__(
        self, broker: FakeBroker, host: str, port: int, *, is_remote: bool = False
    ) -> None:
        hosts = None if is_remote else {host, "127.0.0.1", "localhost", "::1"}
        self._server = _Server((host, port), partial(_Handler, broker, hosts))
        shown = f"[{host}]" if ":" in host else host
        self.url: Final = f"http://{shown}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_S,),
            name="fake-broker-control",
            daemon=True,
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

    def __init__(self, address: tuple[str, int], handler: Callable[..., _Handler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server_version = "reliablepub"
    sys_version = ""
    timeout = REQUEST_WITHIN_S

    def __init__(self, broker: FakeBroker, hosts: set[str] | None, *args: Any) -> None:  # noqa: ANN401
        self._broker = broker
        self._hosts = hosts
        super().__init__(*args)

    def _serve(self) -> None:
        try:
            answer = self._carry_out()
        except RefusedError as refusal:
            self._answer(refusal.status, {"error": str(refusal)})
        except KeyError as error:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"there is no {error.args[0]!r}"})
        except ValueError as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except RuntimeError as error:  # the broker is not running
            self._answer(HTTPStatus.CONFLICT, {"error": str(error)})
        except TimeoutError as error:
            self._answer(HTTPStatus.REQUEST_TIMEOUT, {"error": str(error)})
        except OSError as error:
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})
        else:
            self._answer(HTTPStatus.OK, {} if answer is None else answer)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the base's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Log nothing."""

    def _carry_out(self) -> object:
        self._check_sender()
        target = urlsplit(self.path)
        body = self._body()
        names = [unquote(part) for part in target.path.strip("/").split("/")]
        methods = _PATHS.get((names[0], len(names)))
        if methods is None:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no {target.path}; see /")
        action = methods.get(self.command)
        if action is None:
            text = f"{target.path} takes {', '.join(methods)}"
            raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, text)
        if not isinstance(body, dict):
            raise RefusedError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
        arguments = Arguments(dict(parse_qsl(target.query)) | body)
        return action(self._broker, arguments, *names[1:2])

    def _check_sender(self) -> None:
        if "Origin" in self.headers:
            raise RefusedError(HTTPStatus.FORBIDDEN, "requests of web pages are refused")
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self._hosts is not None and host not in self._hosts:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"this is not the host {host!r}")

    def _body(self) -> object:
        size = self.headers.get("Content-Length", "0")
        if not size.isdecimal() or int(size) > REQUEST_MAX_BYTES:
            text = f"Content-Length must be a number up to {REQUEST_MAX_BYTES}"
            raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        body = self.rfile.read(int(size))
        try:
            return json.loads(body) if body else {}
        except (ValueError, RecursionError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"not JSON: {error}") from error

    def _answer(self, status: HTTPStatus, answer: object) -> None:
        body = json.dumps(answer, default=as_json.plain, indent=1).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with suppress(OSError):  # the client does not read the answer
            self.end_headers()
            self.wfile.write(body)


# ---------------------------------------------------------------------- what the requests do


def _overview(broker: FakeBroker, arguments: Arguments) -> object:
    arguments.expect_none()
    return {
        "url": broker.url,
        "is_up": broker.is_up,
        "connections": broker.connections,
        "published": broker.published_count,
        "faults": len(broker.faults),
        "requests": {
            "/".join(["", name, *["NAME"] * (parts - 1)]): list(methods)
            for (name, parts), methods in _PATHS.items()
        },
    }


def _faults(broker: FakeBroker, arguments: Arguments) -> object:
    arguments.expect_none()
    return [as_json.of_fault(fault) for fault in broker.faults]


def _inject(broker: FakeBroker, arguments: Arguments) -> object:
    broker.inject(fault_of("the fault", arguments.rest()))
    return [as_json.of_fault(fault) for fault in broker.faults]


def _call(name: str, **kinds: tuple[type, object]) -> Action:
    """A method of the broker whose arguments are those of the request."""

    def call(broker: FakeBroker, arguments: Arguments) -> None:
        named = {key: arguments.take(key, *kind) for key, kind in kinds.items()}
        arguments.expect_none()
        getattr(broker, name)(**named)

    return call


def _view(name: str) -> Action:
    """A list of the broker."""

    def view(broker: FakeBroker, arguments: Arguments) -> object:
        vhost = arguments.take("vhost", str, None)
        arguments.expect_none()
        return [as_json.of_record(one) for one in getattr(broker, name)(virtual_host=vhost)]

    return view


def _published(broker: FakeBroker, arguments: Arguments) -> object:
    at_least = arguments.take("at_least", int, 0)
    timeout_s = arguments.take("timeout_s", float, _WAIT_S)
    limit = arguments.take("limit", int, PUBLISHED_LIMIT)
    arguments.expect_none()
    broker.wait_for(at_least, timeout_s)
    published = broker.published
    last = published[max(0, len(published) - max(0, limit)) :]
    return {
        "count": broker.published_count,
        "messages": [as_json.of_record(one) for one in last],
    }


def _messages(broker: FakeBroker, arguments: Arguments, queue: str) -> object:
    vhost = arguments.take("vhost", str, None)
    limit = arguments.take("limit", int, PUBLISHED_LIMIT)
    arguments.expect_none()
    messages = broker.messages(queue, virtual_host=vhost)
    return [as_json.of_record(one) for one in messages[: max(0, limit)]]


def _publish(broker: FakeBroker, arguments: Arguments) -> object:
    body = as_json.body_of(
        arguments.take("body", str, None), arguments.take("body_base64", str, None)
    )
    named = {
        "routing_key": arguments.take("routing_key", str, ""),
        "exchange": arguments.take("exchange", str, ""),
        "properties": arguments.take("properties", dict, None),
        "virtual_host": arguments.take("vhost", str, None),
    }
    arguments.expect_none()
    return {"is_routed": broker.publish(body, **named)}


def _declare_queue(broker: FakeBroker, arguments: Arguments, name: str) -> None:
    named = {
        "durable": arguments.take("durable", bool, True),  # noqa: FBT003
        "arguments": arguments.take("arguments", dict, None),
        "virtual_host": arguments.take("vhost", str, None),
    }
    arguments.expect_none()
    broker.declare_queue(name, **named)


def _declare_exchange(broker: FakeBroker, arguments: Arguments, name: str) -> None:
    named = {
        "type": arguments.take("type", str, "direct"),
        "durable": arguments.take("durable", bool, True),  # noqa: FBT003
        "internal": arguments.take("internal", bool, False),  # noqa: FBT003
        "arguments": arguments.take("arguments", dict, None),
        "virtual_host": arguments.take("vhost", str, None),
    }
    arguments.expect_none()
    broker.declare_exchange(name, **named)


def _delete(name: str) -> Action:
    def delete(broker: FakeBroker, arguments: Arguments, named: str) -> None:
        vhost = arguments.take("vhost", str, None)
        arguments.expect_none()
        getattr(broker, name)(named, virtual_host=vhost)

    return delete


def _bind(broker: FakeBroker, arguments: Arguments) -> None:
    queue, exchange = arguments.take("queue", str), arguments.take("exchange", str)
    named = {
        "routing_key": arguments.take("routing_key", str, ""),
        "arguments": arguments.take("arguments", dict, None),
        "virtual_host": arguments.take("vhost", str, None),
    }
    arguments.expect_none()
    broker.bind(queue, exchange, **named)


def _permit(broker: FakeBroker, arguments: Arguments, user: str) -> None:
    vhost = arguments.take("vhost", str, None)
    rights = {name: arguments.take(name, str, ".*") for name in ("configure", "write", "read")}
    arguments.expect_none()
    broker.set_permissions(user, Permissions(**rights), virtual_host=vhost)


def _set_password(broker: FakeBroker, arguments: Arguments, user: str) -> None:
    password = arguments.take("password", str)
    arguments.expect_none()
    broker.set_password(user, password)


_PATHS: Final[dict[tuple[str, int], dict[str, Action]]] = {
    ("", 1): {"GET": _overview},
    ("faults", 1): {"GET": _faults, "POST": _inject, "DELETE": _call("clear_faults")},
    ("release-confirms", 1): {"POST": _call("release_confirms")},
    ("start", 1): {"POST": _call("start")},
    ("stop", 1): {"POST": _call("stop")},
    ("restart", 1): {"POST": _call("restart")},
    ("crash", 1): {"POST": _call("crash", lose_unsynced=(bool, True))},
    ("drop-connections", 1): {"POST": _call("drop_connections")},
    ("block", 1): {"POST": _call("block", reason=(str, "low on memory"))},
    ("unblock", 1): {"POST": _call("unblock")},
    ("freeze", 1): {"POST": _call("freeze")},
    ("thaw", 1): {"POST": _call("thaw")},
    ("advance", 1): {
        "POST": _call("advance", seconds=(float, ...), clients_are_silent=(bool, False))
    },
    ("reset", 1): {"POST": _call("reset")},
    ("published", 1): {"GET": _published},
    ("messages", 1): {"POST": _publish},
    ("messages", 2): {"GET": _messages},
    ("queues", 1): {"GET": _view("queues")},
    ("queues", 2): {"PUT": _declare_queue, "DELETE": _delete("delete_queue")},
    ("exchanges", 2): {"PUT": _declare_exchange, "DELETE": _delete("delete_exchange")},
    ("bindings", 1): {"POST": _bind},
    ("consumers", 1): {"GET": _view("consumers")},
    ("unacked", 1): {"GET": _view("unacked")},
    ("permissions", 2): {"PUT": _permit},
    ("users", 2): {"PUT": _set_password},
}
"""What a path takes: by its first part and the number of its parts, by the method of HTTP."""
