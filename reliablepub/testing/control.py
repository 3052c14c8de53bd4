"""The control port: the methods of `FakeBroker` over HTTP, for tests in any language.

Knows: HTTP, JSON, which request calls which method, how a record becomes JSON. Must never know:
AMQP, the inside of the broker.

A web page must not control a broker on the same machine. So requests with an `Origin` are refused,
and so are those to a host that is neither the broker's nor loopback (a rebound DNS name).
"""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from pamqp.commands import Basic

from reliablepub.testing.faults import Fault, fault_of
from reliablepub.testing.options import Permissions

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from reliablepub.testing.broker import FakeBroker

Action: TypeAlias = Callable[..., object]
"""Carries out a request, with the broker, the arguments and, if the path has one, a name."""

REQUEST_MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the body of a request."""
REQUEST_WITHIN_S: Final = 30.0
"""Longest wait for the next bytes of a request."""
PUBLISHED_LIMIT: Final = 1000
"""Maximum number of messages in an answer, unless the request sets another one."""
_WAIT_S: Final = 5.0
_POLL_S: Final = 0.05
"""Interval at which the server checks whether it is to stop."""


class RefusedError(Exception):
    """The request is not carried out; the text says why."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Arguments:
    """The arguments of a request, from its query and its JSON object; each is taken once."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named

    def take(self, name: str, kind: type, default: object = ...) -> Any:  # noqa: ANN401 - of `kind`
        """Return an argument.

        Raises:
            RefusedError: It has another type, or is missing and has no default.
        """
        value = self._named.pop(name, default)
        if value is ...:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{name!r} is missing")
        if value is default:
            return value
        if isinstance(value, str) and kind in (int, float):  # of the query
            with suppress(ValueError):
                value = kind(value)
        if isinstance(value, str) and kind is bool:
            value = {"true": True, "false": False}.get(value, value)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{name!r} must be {_KINDS[kind]}")
        return value

    def rest(self) -> dict[str, Any]:
        """Take all arguments that are left."""
        rest, self._named = self._named, {}
        return rest

    def expect_none(self) -> None:
        """Refuse arguments that were not taken.

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
    """The control port of a broker. Serves within its ``with`` block, on threads of its own.

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
        except (ValueError, OverflowError) as error:  # an integer beyond every float overflows
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
        body = json.dumps(answer, default=_plain, indent=1).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with suppress(OSError):  # the client does not read the answer
            self.end_headers()
            self.wfile.write(body)


# ---------------------------------------------------------------------- records as JSON


def _record(record: DataclassInstance) -> dict[str, object]:
    """Return the fields of a record; a body is `body` if it is UTF-8, else `body_base64`.

    An encoded header is replaced by its properties.
    """
    names = (field.name for field in dataclasses.fields(record))
    shown = ("properties" if name == "header" else name for name in names)
    named = {name: getattr(record, name) for name in shown}
    if "body" in named:
        body = named.pop("body")
        try:
            named["body"] = body.decode()
        except UnicodeDecodeError:
            named["body_base64"] = b64encode(body).decode()
    return named


def _fault(fault: Fault) -> dict[str, object]:
    """Return a fault as in a fault file: its kind, and the fields without their default value."""
    named = {field.name: getattr(fault, field.name) for field in dataclasses.fields(fault)}
    defaults = {field.name: field.default for field in dataclasses.fields(fault)}
    changed = {name: value for name, value in named.items() if value != defaults[name]}
    return {"kind": fault.kind} | changed


def _plain(value: object) -> object:
    """Convert a value of a type that JSON lacks.

    Raises:
        TypeError: The type is unknown.
    """
    if isinstance(value, Basic.Properties):
        named = {name: one for name, one in value if one is not None}
        return {name: one for name, one in named.items() if (name, one) != ("cluster_id", "")}
    if isinstance(value, Fault):
        return _fault(value)
    if isinstance(value, bytes | bytearray):
        return {"base64": b64encode(value).decode()}
    if isinstance(value, datetime):
        return int(value.timestamp())
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


# ---------------------------------------------------------------------- requests


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
    return [_fault(fault) for fault in broker.faults]


def _inject(broker: FakeBroker, arguments: Arguments) -> object:
    broker.inject(fault_of("the fault", arguments.rest()))
    return [_fault(fault) for fault in broker.faults]


def _call(method: str, **kinds: tuple[type, object]) -> Action:
    """Call a method of the broker with the name in the path, if there is one, and arguments.

    Args:
        method: Name of the method.
        kinds: Type and default of each argument; ``...`` for no default.
    """

    def call(broker: FakeBroker, arguments: Arguments, *names: str) -> None:
        named = {name: arguments.take(name, *kind) for name, kind in kinds.items()}
        arguments.expect_none()
        if "vhost" in named:
            named["virtual_host"] = named.pop("vhost")
        getattr(broker, method)(*names, **named)

    return call


def _view(name: str) -> Action:
    """List records of the broker."""

    def view(broker: FakeBroker, arguments: Arguments) -> object:
        vhost = arguments.take("vhost", str, None)
        arguments.expect_none()
        return [_record(one) for one in getattr(broker, name)(virtual_host=vhost)]

    return view


def _published(broker: FakeBroker, arguments: Arguments) -> object:
    at_least = arguments.take("at_least", int, 0)
    timeout_s = arguments.take("timeout_s", float, _WAIT_S)
    limit = arguments.take("limit", int, PUBLISHED_LIMIT)
    arguments.expect_none()
    broker.wait_for(at_least, timeout_s)
    published = broker.published
    last = published[max(0, len(published) - max(0, limit)) :]
    return {"count": broker.published_count, "messages": [_record(one) for one in last]}


def _messages(broker: FakeBroker, arguments: Arguments, queue: str) -> object:
    vhost = arguments.take("vhost", str, None)
    limit = arguments.take("limit", int, PUBLISHED_LIMIT)
    arguments.expect_none()
    messages = broker.messages(queue, virtual_host=vhost)
    return [_record(one) for one in messages[: max(0, limit)]]


def _publish(broker: FakeBroker, arguments: Arguments) -> object:
    body, base64 = arguments.take("body", str, None), arguments.take("body_base64", str, None)
    if body is not None and base64 is not None:
        raise ValueError("give either body or body_base64")
    content = (body or "").encode() if base64 is None else b64decode(base64, validate=True)
    named = {
        "routing_key": arguments.take("routing_key", str, ""),
        "exchange": arguments.take("exchange", str, ""),
        "properties": arguments.take("properties", dict, None),
        "virtual_host": arguments.take("vhost", str, None),
    }
    arguments.expect_none()
    return {"is_routed": broker.publish(content, **named)}


def _permit(broker: FakeBroker, arguments: Arguments, user: str) -> None:
    vhost = arguments.take("vhost", str, None)
    rights = {name: arguments.take(name, str, ".*") for name in ("configure", "write", "read")}
    arguments.expect_none()
    broker.set_permissions(user, Permissions(**rights), virtual_host=vhost)


_VHOST: Final = (str, None)
_TABLE: Final = (dict, None)
_DECLARE_QUEUE: Final = _call("declare_queue", durable=(bool, True), arguments=_TABLE, vhost=_VHOST)
_DECLARE_EXCHANGE: Final = _call(
    "declare_exchange",
    type=(str, "direct"),
    durable=(bool, True),
    internal=(bool, False),
    arguments=_TABLE,
    vhost=_VHOST,
)
_BIND: Final = _call(
    "bind",
    queue=(str, ...),
    exchange=(str, ...),
    routing_key=(str, ""),
    arguments=_TABLE,
    vhost=_VHOST,
)
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
    ("queues", 2): {"PUT": _DECLARE_QUEUE, "DELETE": _call("delete_queue", vhost=_VHOST)},
    ("exchanges", 2): {
        "PUT": _DECLARE_EXCHANGE,
        "DELETE": _call("delete_exchange", vhost=_VHOST),
    },
    ("bindings", 1): {"POST": _BIND},
    ("clients", 1): {"GET": _view("clients")},
    ("consumers", 1): {"GET": _view("consumers")},
    ("unacked", 1): {"GET": _view("unacked")},
    ("permissions", 2): {"PUT": _permit},
    ("users", 2): {"PUT": _call("set_password", password=(str, ...))},
}
"""Actions by the first part of a path and the number of its parts, then by HTTP method."""
