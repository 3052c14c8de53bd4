"""Settings of a node: limits, users and permissions.

Knows: defaults. Must never know: how a setting takes effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """A user's rights in a virtual host: regular expressions for names of queues and exchanges.

    As in RabbitMQ, an expression matches anywhere in the name; an empty one matches nothing.

    Attributes:
        configure: Names that the user may declare and delete.
        write: Names that the user may publish to, and bind as a destination.
        read: Names that the user may consume, get, purge, and bind as a source.

    Raises:
        ValueError: A value is not a regular expression.
    """

    configure: str = ".*"
    write: str = ".*"
    read: str = ".*"

    def __post_init__(self) -> None:
        """Compile each expression, to refuse an invalid one here and not at its first use."""
        for right in ("configure", "write", "read"):
            try:
                re.compile(getattr(self, right))
            except re.error as error:
                given = getattr(self, right)
                msg = f"{right} {given!r} is not a regular expression: {error}"
                raise ValueError(msg) from error

    def allow(self, right: str, name: str) -> bool:
        """Whether `configure`, `write` or `read` matches a name."""
        return re.search(getattr(self, right) or "^$", name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Settings of a node, as made in rabbitmq.conf or with rabbitmqctl.

    Attributes:
        users: Passwords by user name.
        virtual_hosts: Names; `FakeBroker` uses the first one by default, in its URL and methods.
        permissions: By user and virtual host. A user that is listed may enter only the virtual
            hosts listed for it; a user that is not listed has all rights.
        heartbeat_s: Heartbeat in seconds, proposed in connection.tune; 0 for none.
        channel_max: Maximum number of open channels per connection.
        user_channel_max: Maximum number of open channels by user, on all connections together; a
            user that is not listed has no limit.
        frame_max: Frame size in bytes, proposed in connection.tune.
        max_message_size: Maximum size of a body in bytes; a larger one is refused with 406.
        flush_delay_s: Seconds for which persistent messages are collected before they are written
            and confirmed together. 0 writes them as soon as no more input is waiting.
        history_max: Maximum number of publishes kept in the history.
        history_bytes_max: Maximum total size of their bodies; the last publish is always kept.
        consumer_timeout_s: Seconds within which a delivery must be acknowledged; otherwise its
            channel is closed with 406. None for no limit.
        connections_max: Maximum number of connections; further ones are closed at once, with a
            warning in the log of `reliablepub.testing`.
        seed: Seed of all random choices.

    Raises:
        ValueError: No user or no virtual host is given, or permissions name one that does not
            exist.
    """

    users: Mapping[str, str] = field(default_factory=lambda: {"guest": "guest"}, repr=False)
    virtual_hosts: tuple[str, ...] = ("/",)
    permissions: Mapping[str, Mapping[str, Permissions]] = field(default_factory=dict)
    heartbeat_s: int = 60
    channel_max: int = 2047
    user_channel_max: Mapping[str, int] = field(default_factory=dict)
    frame_max: int = 131_072
    max_message_size: int = 128 * 1024 * 1024
    flush_delay_s: float = 0.0
    history_max: int = 100_000
    history_bytes_max: int = 256 * 1024 * 1024
    consumer_timeout_s: float | None = 1_800.0
    connections_max: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse permissions of an unknown user or virtual host, and a node without either."""
        if isinstance(self.virtual_hosts, str):  # ("shop") without its comma
            msg = f"virtual_hosts is a text; write ({self.virtual_hosts!r},)"
            raise ValueError(msg)  # noqa: TRY004 - as for other settings
        if not self.users or not self.virtual_hosts:
            raise ValueError("a node needs at least one user and one virtual host")
        for user, granted in self.permissions.items():
            if user not in self.users:
                raise ValueError(f"permissions are given to {user!r}, who is not one of the users")
            for name in granted:
                if name not in self.virtual_hosts:
                    raise ValueError(f"permissions of {user!r}: there is no virtual host {name!r}")

    def permissions_of(self, user: str, virtual_host: str) -> Permissions | None:
        """Return a user's rights in a virtual host; None if the user may not enter it."""
        if user not in self.permissions:
            return EVERYTHING
        return self.permissions[user].get(virtual_host)


EVERYTHING = Permissions()
