"""Encryption at rest (AES-256-GCM) for bodies and properties; the address is authenticated.

Knows: AES-256-GCM, keys by name, key files and their modes. Must never know: tables, AMQP.

The body and the properties (headers included) of a row are encrypted together. The message id,
exchange, routing key, ordering key, times and sizes are not encrypted, because statements search by
them. The properties column holds the name of the key. The checksum covers the stored bytes, so
audit and salvage need no key.

A row of version 2 (``{"$key":"2026-11","v":2}``) begins with a fingerprint of its key. Its
associated data are row id, message id, exchange, routing key and ordering key. A wrong key has
another fingerprint, and stops the relay. A row that the right key cannot decrypt was changed, and
is parked.

A row of version 1 (``{"$key":"2026-11"}``) has no fingerprint, and its associated data are row id
and message id only. It can still be read. Removing ``"v":2`` from a row does not turn it into
version 1, because the associated data differ.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Self

from reliablepub.errors import ConfigurationError, OutboxSealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


_OTHERS = stat.S_IRWXO | stat.S_IWGRP


def exposure(path: str | os.PathLike[str]) -> str:
    """Describe which other users can use a secret file, and the remedy; empty if none can.

    Only the owner may write to the file: this user, or root. A group may read it, because services
    get secrets that way; other users may not.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return ""
    quoted = shlex.quote(str(path))
    if found.st_mode & _OTHERS:
        return (
            f"other users of this machine can read or replace {path} (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), and it holds a secret; chmod 600 {quoted}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        return (
            f"user {found.st_uid}, who owns {path}, can read or replace it, and it holds a secret; "
            f"chown {os.geteuid()} {quoted}"
        )
    return ""


LOGGER: Final = logging.getLogger("reliablepub.outbox")
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_LENGTH_BYTES: Final = 4
_NAME_MAX: Final = 64
_FINGERPRINT_BYTES: Final = 8
_MARK: Final = '{"$key":'
_VERSION: Final = 2
_FINGERPRINT_LABEL: Final = b"reliablepub: fingerprint of an outbox key"

Where = tuple[str, str, str, str | None]
"""Message id, exchange, routing key and ordering key of a row: not encrypted, but authenticated."""


class Forged(ValueError):
    """The row was changed, or was stored without the keys; the text says which one."""


def _key_of(text: str) -> bytes:
    """Return the key of a line; raise `ValueError` if it is none, but perhaps the name."""
    key = bytes.fromhex(text)
    if len(key) != _KEY_BYTES:
        raise ValueError
    return key


class OutboxKeys:
    """Encryption keys of an outbox, by name. The first one encrypts; all of them decrypt.

    To rotate keys without interruption, add the new key at the end in every process; then make it
    the first in every process; then run ``reliablepub outbox rekey``; then remove the old key. Use
    a key for at most 4 billion (2^32) messages: each has a random nonce of 96 bits.

    Args:
        keys: keys of 32 bytes by name. The names, such as ``"2026-11"``, are stored unencrypted.
        accept_plaintext: whether to publish messages that are not encrypted. By default the relay
            parks them, because a process without the keys, or an intruder, has stored them.

    Raises:
        ConfigurationError: a key or a name cannot be used, or `cryptography` is not installed.

    Example:
        A key is 32 random bytes::

            keys = OutboxKeys({"2026-11": secrets.token_bytes(32)})
    """

    def __init__(self, keys: Mapping[str, bytes], *, accept_plaintext: bool = False) -> None:
        if not isinstance(keys, Mapping):  # its value may be a key: it is not shown
            kind = type(keys).__name__
            raise ConfigurationError(f"OutboxKeys takes a mapping of names to keys, not {kind}")
        if not keys:
            raise ConfigurationError("OutboxKeys needs at least one key")
        for name, key in keys.items():
            if not isinstance(name, str) or not isinstance(key, bytes):
                raise ConfigurationError("OutboxKeys takes names as str, and keys as bytes")
            if not _is_name(name):
                msg = f"key name {name!r} must be 1 to {_NAME_MAX} printable ASCII characters"
                raise ConfigurationError(msg)
            if len(key) != _KEY_BYTES:
                msg = f"key {name!r} has {len(key)} bytes; it must have {_KEY_BYTES}, for AES-256"
                raise ConfigurationError(msg)
        cipher = _cipher()
        self._ciphers: dict[str, AESGCM] = {name: cipher(key) for name, key in keys.items()}
        self._fingerprints: dict[str, bytes] = {name: _fingerprint(k) for name, k in keys.items()}
        self._current: str = next(iter(keys))
        self._accepts_plaintext = accept_plaintext

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: a pickle would hold the keys."""
        raise TypeError("OutboxKeys cannot be pickled; make them in each process that needs them")

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, accept_plaintext: bool = False) -> Self:
        """Read keys from a file. Each line is a name, a space and 64 hexadecimal digits.

        The first key encrypts. Empty lines, and lines that begin with ``#``, are ignored.

        Args:
            path: path of the file.
            accept_plaintext: whether to publish messages that are not encrypted.

        Raises:
            ConfigurationError: the file cannot be used. The error does not show its contents.
        """
        keys: dict[str, bytes] = {}
        is_repeated = False
        if words := exposure(path):
            LOGGER.warning("%s", words, extra={"event": "exposed"})
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
            for line in lines:
                if line.strip() and not line.startswith("#"):
                    name, text = line.split()
                    is_repeated = is_repeated or name in keys
                    keys[name] = _key_of(text)
        except OSError as error:
            raise ConfigurationError(f"key file {path} cannot be read: {error.strerror}") from None
        except ValueError:
            msg = f"each line of key file {path} is a name, a space and 64 hexadecimal digits"
            raise ConfigurationError(msg) from None
        if is_repeated:  # the messages of the first one could not be decrypted
            raise ConfigurationError(f"key file {path} has two keys of the same name; rename one")
        return cls(keys, accept_plaintext=accept_plaintext)

    def __repr__(self) -> str:
        """Return the names of the keys, without the keys."""
        return f"OutboxKeys({', '.join(map(repr, self._ciphers))})"

    def _seal(self, id_: int, where: Where, properties: str, body: bytes) -> tuple[str, bytes]:
        assert id_ > 0
        name = self._current
        encoded = properties.encode()
        plain = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded + body
        nonce = os.urandom(_NONCE_BYTES)
        bound_to = _bound_to(name, id_, where)
        ciphertext = self._ciphers[name].encrypt(nonce, plain, bound_to)
        return _mark(name), self._fingerprints[name] + nonce + ciphertext

    def _unseal(
        self, name: str, version: int, id_: int, where: Where, body: bytes
    ) -> tuple[str, bytes]:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

        message_id = where[0]
        bound_to = f"{id_}\0{message_id}".encode()
        is_right_key = False
        if version != 1:
            bound_to = _bound_to(name, id_, where)
            is_right_key = body.startswith(self._fingerprints[name])
            body = body[_FINGERPRINT_BYTES:]
        nonce, ciphertext = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            plain = self._ciphers[name].decrypt(nonce, ciphertext, bound_to)
        except (InvalidTag, ValueError):
            if is_right_key:
                raise Forged(
                    f"it was changed since it was encrypted with key {name!r}: its address, its "
                    "number or its content is not what was accepted"
                ) from None
            raise OutboxSealed(
                f"message {message_id} (row {id_}) cannot be decrypted: the key that is called "
                f"{name!r} here is not the one it was encrypted with, or the row was moved; "
                "nothing is lost: give the right key"
            ) from None
        end = _LENGTH_BYTES + int.from_bytes(plain[:_LENGTH_BYTES], "big")
        return plain[_LENGTH_BYTES:end].decode(), plain[end:]


def sealed(
    keys: OutboxKeys, id_: int, where: Where, properties: str, body: bytes
) -> tuple[str, bytes]:
    """Encrypt the properties and body of a row under the first key."""
    return keys._seal(id_, where, properties, body)  # noqa: SLF001 - same module


def is_sealed(properties: str) -> bool:
    """Whether a row is encrypted."""
    return properties.startswith(_MARK)


def current_mark(keys: OutboxKeys) -> str:
    """Return the properties column of a row that is encrypted under the first key."""
    return _mark(keys._current)  # noqa: SLF001 - same module


def marks(name: str) -> dict[str, str]:
    """Return the properties columns of rows that are encrypted with a key, by value's name."""
    return {"mark": _mark(name), "first_mark": f"{_MARK}{json.dumps(name)}}}"}


def fingerprints(keys: OutboxKeys | None) -> dict[str, str]:
    """Return the fingerprint of each key by its name, in hexadecimal, for other processes."""
    found = {} if keys is None else keys._fingerprints  # noqa: SLF001 - same module
    return {name: fingerprint.hex() for name, fingerprint in found.items()}


def opened(
    keys: OutboxKeys | None, id_: int, where: Where, properties: str, body: bytes
) -> tuple[str, bytes]:
    """Return the properties and body of a row, decrypted if they are encrypted."""
    if not is_sealed(properties):
        if keys is None or keys._accepts_plaintext:  # noqa: SLF001 - same module
            return properties, body
        raise Forged(
            "it is not encrypted, and keys are given: a process without them has stored it, or an "
            "intruder; if it is yours, encrypt it (`reliablepub outbox rekey --accept-plaintext`) "
            "and retry it"
        )
    mark = json.loads(properties)
    name, version = mark["$key"], mark.get("v", 1)
    if not (isinstance(name, str) and _is_name(name)):
        raise ValueError("it claims to be encrypted, with a key whose name no key can have")
    if keys is None or name not in keys._ciphers:  # noqa: SLF001 - same module
        raise OutboxSealed(
            f"message {where[0]} (row {id_}) is encrypted with key {name!r}, and that key was "
            "not given; nothing is lost: give it too"
        )
    return keys._unseal(name, version, id_, where, body)  # noqa: SLF001


def _is_name(name: str) -> bool:
    return 0 < len(name) <= _NAME_MAX and name.isascii() and name.isprintable()


def _mark(name: str) -> str:
    return f'{_MARK}{json.dumps(name)},"v":{_VERSION}}}'


def _bound_to(name: str, id_: int, where: Where) -> bytes:
    return json.dumps([_VERSION, name, id_, *where]).encode()


def _fingerprint(key: bytes) -> bytes:
    """Return 8 bytes that identify a key and reveal nothing else about it (HMAC-SHA-256)."""
    return hmac.digest(key, _FINGERPRINT_LABEL, hashlib.sha256)[:_FINGERPRINT_BYTES]


def _cipher() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
    except ImportError:
        needs = "an encrypted outbox needs cryptography"
        msg = f"{needs}: install reliablepub with the extra encryption"
        raise ConfigurationError(msg) from None
    return AESGCM
