"""Direct reply-to: the pseudo-queue `amq.rabbitmq.reply-to`, and the names generated for it.

PURE: this module knows the form of a generated name.
It must never know channels, or how a reply is delivered.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from reliablepub.testing.replies import crashed

if TYPE_CHECKING:
    from random import Random

PSEUDO_QUEUE: Final = "amq.rabbitmq.reply-to"
"""A client consumes from this name, and puts it into `reply_to` of its requests."""

_NODE_NAME: Final = b"reply@1"
_PROCESS_ID_HEAD: Final = b"\x83Xv"  # NEW_PID_EXT, with the node's name as an atom
_PROCESS_ID = struct.Struct(f">H{len(_NODE_NAME)}sIII")  # size, name, id, serial, creation
_KEY_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class ReplyConsumer:
    """The one consumer of direct replies that a channel may have."""

    tag: str
    name: str
    """The routing key of its replies, which replaces the pseudo-queue in `reply_to`."""


def generated_reply_name(random: Random) -> str:
    """A name of RabbitMQ's form: an Erlang process id and a key, both in base64."""
    process = _PROCESS_ID.pack(len(_NODE_NAME), _NODE_NAME, random.getrandbits(15), 0, 1)
    parts = (_PROCESS_ID_HEAD + process, random.randbytes(_KEY_SIZE))
    return ".".join((PSEUDO_QUEUE, *(b64encode(part).decode() for part in parts)))


def check_reply_name(name: str) -> None:
    """Raise 541 for a name with two parts of which the first is no process id.

    RabbitMQ's channel crashes over such a name. A name of one part, or of three, names no consumer.
    """
    prefix, _, rest = name.partition(f"{PSEUDO_QUEUE}.")
    parts = [part for part in rest.split(".") if part]
    if prefix or len(parts) != 2:  # noqa: PLR2004 - a process id and a key
        return
    try:
        is_process = b64decode(parts[0], validate=True).startswith(_PROCESS_ID_HEAD)
    except ValueError:
        is_process = False
    if not is_process:
        raise crashed()
