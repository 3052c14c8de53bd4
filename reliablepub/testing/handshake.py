"""The opening of a connection: start, start-ok, tune, tune-ok, open.

Knows: how a client logs in (PLAIN, AMQPLAIN, EXTERNAL), which limits are negotiated, the reply
texts with which RabbitMQ refuses a client. Must never know: channels, messages, sockets.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from pamqp.commands import Connection as Methods

from reliablepub.testing import decoding, wire
from reliablepub.testing.faults import ConnectionFault, HandshakeFault, RefuseHandshake
from reliablepub.testing.options import EVERYTHING
from reliablepub.testing.replies import AmqpError, SilentlyRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pamqp.base import Frame

    from reliablepub.testing.node import Node, Token
    from reliablepub.testing.options import Permissions

_CAPABILITIES = (
    *("authentication_failure_close", "basic.nack", "connection.blocked", "consumer_cancel_notify"),
    *("consumer_priorities", "direct_reply_to", "exchange_exchange_bindings"),
    *("per_consumer_qos", "publisher_confirms"),
)
_OPEN_IDS = (10, 40)
_UPDATE_SECRET_IDS = (10, 70)
_STEPS: dict[type[Frame], str] = {
    Methods.StartOk: "start_ok",
    Methods.TuneOk: "tune_ok",
    Methods.Open: "open",
}


class Stalled(Exception):
    """A fault leaves the client without an answer."""


class ScriptedRefusal(AmqpError):
    """A fault sends connection.close, even where RabbitMQ would not."""


class Handshake:
    """The state of the handshake with one client, and the negotiated limits."""

    def __init__(self, node: Node, faults: Iterable[ConnectionFault] = ()) -> None:
        options = node.options
        self._node = node
        self._fault = next((one for one in faults if isinstance(one, HandshakeFault)), None)
        self.permissions: Permissions = EVERYTHING
        self._expected: type[Frame] = Methods.StartOk
        self.user: str = ""
        self.certificate_user = ""
        """Common name of the certificate that the client has shown, if it has."""
        self.client_properties: Mapping[str, Any] = {}
        self.token: Token | None = None
        self.capabilities: frozenset[str] = frozenset()
        self.frame_max: int = wire.FRAME_MIN_SIZE
        self.channel_max: int = options.channel_max
        self.heartbeat_s: int = 0

    @property
    def is_open(self) -> bool:
        """Whether the handshake is finished: connection.open was answered."""
        return self._expected is Methods.Close

    @property
    def is_tuned(self) -> bool:
        """Whether connection.tune-ok has arrived; from then on errors are reported."""
        return self._expected in (Methods.Open, Methods.Close)

    def start(self) -> bytes:
        """Return the frame of connection.start, the answer to the protocol header.

        Raises:
            ScriptedRefusal: A fault refuses the client with a reply code.
            SilentlyRefused: A fault closes the socket without a reply.
            Stalled: A fault leaves the client without an answer.
        """
        self._go_wrong_at("protocol_header")
        properties: dict[str, Any] = {
            "capabilities": dict.fromkeys(_CAPABILITIES, True),
            "product": "RabbitMQ",
            "platform": "reliablepub fake broker",
            "version": "3.13.7",
        }
        # As with rabbitmq_auth_mechanism_ssl and `ssl_cert_login_from = common_name`.
        mechanisms = "PLAIN AMQPLAIN" + " EXTERNAL" * bool(self.certificate_user)
        method = Methods.Start(server_properties=properties, mechanisms=mechanisms)
        return wire.encode_method(0, method)

    def handle(self, method: Frame) -> Frame | None:
        """Return the answer to the next method of the handshake.

        Raises:
            AmqpError: The client is refused with a reply code.
            SilentlyRefused: The client is refused without a reply, as by RabbitMQ.
            Stalled: A fault leaves the client without an answer.
        """
        self._go_wrong_at(_STEPS.get(type(method)))
        if type(method) is not self._expected:
            if not self.is_tuned:
                raise SilentlyRefused
            explanation = "unexpected method in connection state opening"
            raise AmqpError(504, explanation, (method.index >> 16, method.index & 0xFFFF))
        if isinstance(method, Methods.StartOk):
            self._log_in(method)
            self._expected = Methods.TuneOk
            options = self._node.options
            return Methods.Tune(options.channel_max, options.frame_max, options.heartbeat_s)
        if isinstance(method, Methods.TuneOk):
            self._tune(method)
            self._expected = Methods.Open
            return None
        assert isinstance(method, Methods.Open)
        vhost = method.virtual_host
        if vhost not in self._node.options.virtual_hosts:
            raise AmqpError(530, f"vhost {vhost} not found", _OPEN_IDS)
        permissions = self._node.options.permissions_of(self.user, vhost)
        if permissions is None:
            refused = f"access to vhost '{vhost}' refused for user '{self.user}'"
            raise AmqpError(530, refused, _OPEN_IDS)
        self.permissions = permissions
        self._expected = Methods.Close
        return Methods.OpenOk()

    def update_secret(self, secret: str) -> None:
        """Replace the token (connection.update-secret); no effect for a user with a password.

        RabbitMQ checks the signature here, and the expiry with the next permission.

        Raises:
            AmqpError: The secret is not a token.
        """
        if self.token is None:
            return
        token = self._node.tokens.get(secret)
        if token is None:
            refused = "New secret was refused by one of the backends"
            raise AmqpError(530, refused, _UPDATE_SECRET_IDS)
        self.user, self.token = token.user, token

    def _go_wrong_at(self, step: str | None) -> None:
        fault = self._fault
        if fault is None or fault.at != step:
            return
        if not isinstance(fault, RefuseHandshake):
            raise Stalled
        if fault.code is None:
            raise SilentlyRefused
        raise ScriptedRefusal(fault.code, fault.text, (0, 0))

    def _log_in(self, method: Methods.StartOk) -> None:
        self.client_properties = dict(method.client_properties)
        announced = method.client_properties.get("capabilities")
        if isinstance(announced, dict):
            self.capabilities = frozenset(name for name, is_on in announced.items() if is_on)
        response = method.response
        data = response.encode() if isinstance(response, str) else bytes(response)
        if method.mechanism == "EXTERNAL" and self.certificate_user in self._node.options.users:
            self.user = self.certificate_user
            return
        user, password = _credentials(method.mechanism, data)
        known = self._node.options.users.get(user)
        token = self._node.tokens.get(password)
        if token is not None and token.expires_at > self._node.now:
            self.user, self.token = token.user, token
            return
        if known is None or not hmac.compare_digest(known.encode(), password.encode()):
            if "authentication_failure_close" not in self.capabilities:
                raise SilentlyRefused
            raise AmqpError(
                403,
                "Login was refused using authentication mechanism "
                f"{method.mechanism}. For details see the broker logfile.",
            )
        self.user = user

    def _tune(self, method: Methods.TuneOk) -> None:
        options = self._node.options
        self.frame_max = _negotiated(method.frame_max, options.frame_max)
        if self.frame_max < wire.FRAME_MIN_SIZE:
            raise SilentlyRefused
        self.channel_max = _negotiated(method.channel_max, options.channel_max)
        self.heartbeat_s = method.heartbeat or 0


def _negotiated(asked: int | None, offered: int) -> int:
    """Return the client's choice of a limit; refuse more than was offered, and 0 (no limit)."""
    if not offered:
        return asked or 0
    if not asked or asked > offered:
        raise SilentlyRefused
    return asked


def _credentials(mechanism: str, response: bytes) -> tuple[str, str]:
    if mechanism == "PLAIN":
        parts = response.split(b"\x00")
        if len(parts) == 3 and not parts[0]:  # noqa: PLR2004 - no authorization id, user, password
            return parts[1].decode(errors="replace"), parts[2].decode(errors="replace")
    elif mechanism == "AMQPLAIN":
        try:
            table = decoding.decode_table(response)
        except decoding.MalformedError:
            table = {}
        user, password = table.get("LOGIN"), table.get("PASSWORD")
        if isinstance(user, str) and isinstance(password, str):
            return user, password
    elif mechanism == "EXTERNAL":
        return "", ""
    raise SilentlyRefused
