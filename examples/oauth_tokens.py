"""OAuth 2 client credentials: tokens from an endpoint, renewed on the open connection.

Needs Authlib and requests; starts a token endpoint and a fake broker::

    python examples/oauth_tokens.py

or uses your own broker: ``python examples/oauth_tokens.py amqp://guest:guest@localhost/``. Without
RabbitMQ's OAuth 2 plugin, the endpoint issues the password instead of tokens.

It prints::

    published: 30
    tokens: at least 3
    connections: 1
"""

import json
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Self
from urllib.parse import parse_qs, urlsplit

import pika
import requests
from authlib.integrations.requests_client import OAuth2Session, OAuthError

from reliablepub import ConfigurationError, Credentials, Publisher
from reliablepub.testing import FakeBroker

LIFETIME_S = 1.5
"""Lifetime of the tokens in this example; real ones are valid for minutes."""
TOKENS_MIN = 3


class ClientCredentials:
    """A provider for `Publisher(..., credentials=...)`: the grant of RFC 6749, section 4.4."""

    def __init__(self, endpoint: str, client_id: str, client_secret: str) -> None:
        self._endpoint = endpoint
        self._client_id = client_id
        self._client_secret = client_secret

    def __call__(self) -> Credentials:
        """Request a token from the endpoint; reliablepub calls this on a separate thread."""
        try:
            with OAuth2Session(self._client_id, self._client_secret) as session:
                grant = {"grant_type": "client_credentials", "timeout": 5}
                token = session.fetch_token(self._endpoint, **grant)
        except OAuthError as error:  # its code is one of RFC 6749, such as invalid_client
            raise ConfigurationError(f"the token endpoint says {error.error}") from None
        except requests.HTTPError as error:
            code = error.response.status_code
            raise ConfigurationError(f"the token endpoint answers {code}") from None
        except requests.RequestException as error:
            raise ConfigurationError(f"no token endpoint: {type(error).__name__}") from None
        return Credentials(token["access_token"], lifetime_s=token.get("expires_in"))


class TokenEndpoint:
    """A token endpoint for tests, with one client and its secret."""

    def __init__(
        self, issue: Callable[[], str], *, lifetime_s: float, client: str = "orders:hush"
    ) -> None:
        self.issued = 0
        self.is_failing = False
        wanted = f"Basic {b64encode(client.encode()).decode()}"

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805 - the library's name; self is taken
                size = int(handler.headers["Content-Length"])
                grant = parse_qs(handler.rfile.read(size).decode())["grant_type"]
                if self.is_failing:
                    handler.answer(503, {})
                elif handler.headers["Authorization"] != wanted or grant != ["client_credentials"]:
                    handler.answer(401, {"error": "invalid_client"})
                else:
                    self.issued += 1
                    token = {"access_token": issue(), "expires_in": lifetime_s}
                    handler.answer(200, token | {"token_type": "bearer"})

            def answer(handler, code: int, value: object) -> None:  # noqa: N805
                body = json.dumps(value).encode()
                handler.send_response(code)
                handler.send_header("Content-Type", "application/json")
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}/token"

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def main() -> None:
    """Publish for longer than the lifetime of two tokens."""
    with ExitStack() as stack:
        if len(sys.argv) > 1:
            url = sys.argv[1]
            password = urlsplit(url).password or ""
            issue: Callable[[], str] = lambda: password  # noqa: E731
        else:
            broker = stack.enter_context(FakeBroker())
            url, issue = broker.url, lambda: broker.issue_token(LIFETIME_S)
        channel = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url))).channel()
        queue = channel.queue_declare("", exclusive=True).method.queue

        endpoint = stack.enter_context(TokenEndpoint(issue, lifetime_s=LIFETIME_S))
        provider = ClientCredentials(endpoint.url, "orders", "hush")
        folder = stack.enter_context(TemporaryDirectory())
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        bare = parts._replace(netloc=f"{parts.username}@{host}").geturl()
        with Publisher(bare, outbox=Path(folder) / "outbox.db", credentials=provider) as publisher:
            for number in range(30):
                publisher.publish(b"%d" % number, routing_key=queue)
                time.sleep(0.1)
            status = publisher.flush(timeout_s=30)
        print("published:", status.counters.confirmed)
        print("tokens:", "at least 3" if endpoint.issued >= TOKENS_MIN else endpoint.issued)
        print("connections:", status.connects)


if __name__ == "__main__":
    main()
