"""What a node is told before it starts.

This module knows defaults. It must never know what is done with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What a user may do in a virtual host: regular expressions for names of queues and exchanges.

    As in RabbitMQ they match anywhere in the name, and an empty one matches nothing.

    Attributes:
        configure: Declare and delete.
        write: Publish, and bind to it.
        read: Consume, get, purge, and bind from it.
    """

    configure: str = ".*"
    write: str = ".*"
    read: str = ".*"

    def allow(self, right: str, name: str) -> bool:
        """Whether `configure`, `write` or `read` matches a name."""
        return re.search(getattr(self, right) or "^$", name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """What rabbitmq.conf and rabbitmqctl would say.

    Attributes:
        users: Names and passwords that may log in.
        virtual_hosts: The first is the one of `FakeBroker.url` and of its methods by default.
        permissions: By user and virtual host. Who is in it may enter only the virtual hosts listed
            there; who is not may do everything.
        heartbeat_s: Proposed in connection.tune; 0 is none.
        channel_max: Channels a connection may have open.
        user_channel_max: Channels a user may have open, on all connections together; who is not in
            it is not limited.
        frame_max: Proposed in connection.tune.
        max_message_size: Bytes a body may have; above it is 406.
        flush_delay_s: How long persistent messages gather before they are written together.
        history_max: How many publishes are remembered.
        history_bytes_max: How many bytes of bodies at most; the last publish always is.
        seed: Of everything random.
    """

    users: Mapping[str, str] = field(default_factory=lambda: {"guest": "guest"}, repr=False)
    virtual_hosts: tuple[str, ...] = ("/",)
    permissions: Mapping[str, Mapping[str, Permissions]] = field(default_factory=dict)
    heartbeat_s: int = 60
    channel_max: int = 2047
    user_channel_max: Mapping[str, int] = field(default_factory=dict)
    frame_max: int = 131_072
    max_message_size: int = 128 * 1024 * 1024
    flush_delay_s: float = 0.002
    history_max: int = 100_000
    history_bytes_max: int = 256 * 1024 * 1024
    seed: int = 0

    def permissions_of(self, user: str, virtual_host: str) -> Permissions | None:
        """What a user may do there; None is nothing, not even enter."""
        if user not in self.permissions:
            return EVERYTHING
        return self.permissions[user].get(virtual_host)


EVERYTHING = Permissions()
