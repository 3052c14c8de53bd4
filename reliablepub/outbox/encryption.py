"""Bodies and properties that nobody reads who has only the file.

Knows: AES-256-GCM, keys by name. Must never know: tables, or where keys come from.

A row's body and properties (headers among them) are one plaintext and one ciphertext. In clear stay
the message id, exchange, routing key and ordering key, times and sizes: people and statements look
for messages by them. The name of the key stands where the properties were. The ciphertext is bound
to the row's number and message id: moved to another row, it is not accepted. The checksum is over
what is stored, so an audit and a salvage need no key, and a wrong key is told from a flipped bit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from reliablepub.errors import ConfigurationError, OutboxSealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_LENGTH_BYTES: Final = 4
_NAME_MAX: Final = 64
_MARK: Final = '{"$key":'


class OutboxKeys:
    """Keys for what an outbox holds, by name. The first encrypts; all of them decrypt.

    To rotate, put a new key first and keep the old one until no message under it is left. Use a key
    for no more than four thousand million messages: each has a random nonce of 96 bits.

    Args:
        keys: 32 bytes each. A name is written into the file in clear, such as ``"2026-11"``.

    Raises:
        ConfigurationError: a key or a name cannot be used, or `cryptography` is not installed.

    Example:
        A key is 32 random bytes::

            keys = OutboxKeys({"2026-11": secrets.token_bytes(32)})
    """

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigurationError("OutboxKeys needs at least one key")
        for name, key in keys.items():
            if not (0 < len(name) <= _NAME_MAX and name.isascii() and name.isprintable()):
                msg = f"key name {name!r} must be 1 to {_NAME_MAX} printable ASCII characters"
                raise ConfigurationError(msg)
            if len(key) != _KEY_BYTES:
                msg = f"key {name!r} has {len(key)} bytes; it must have {_KEY_BYTES}, for AES-256"
                raise ConfigurationError(msg)
        cipher = _cipher()
        self._ciphers: dict[str, AESGCM] = {name: cipher(key) for name, key in keys.items()}
        self._current: str = next(iter(keys))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Keys from a file: a line each, a name and the key as 64 hexadecimal digits; first first.

        Raises:
            ConfigurationError: the file cannot be used; nothing of it is shown.
        """
        keys: dict[str, bytes] = {}
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
            for line in lines:
                if line.strip() and not line.startswith("#"):
                    name, text = line.split()
                    keys[name] = bytes.fromhex(text)
        except OSError as error:
            raise ConfigurationError(f"key file {path} cannot be read: {error.strerror}") from None
        except ValueError:
            msg = f"each line of key file {path} is a name, a space and 64 hexadecimal digits"
            raise ConfigurationError(msg) from None
        return cls(keys)

    def __repr__(self) -> str:
        """Names only."""
        return f"OutboxKeys({', '.join(map(repr, self._ciphers))})"

    def _seal(self, id_: int, message_id: str, properties: str, body: bytes) -> tuple[str, bytes]:
        assert id_ > 0
        encoded = properties.encode()
        plain = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded + body
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._current].encrypt(nonce, plain, _bound_to(id_, message_id))
        return f"{_MARK}{json.dumps(self._current)}}}", nonce + sealed

    def _unseal(self, name: str, id_: int, message_id: str, body: bytes) -> tuple[str, bytes]:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

        nonce, sealed = body[:_NONCE_BYTES], body[_NONCE_BYTES:]
        try:
            plain = self._ciphers[name].decrypt(nonce, sealed, _bound_to(id_, message_id))
        except InvalidTag:
            raise OutboxSealed(
                f"message {message_id} (row {id_}) cannot be decrypted: the key that is called "
                f"{name!r} here is not the one it was encrypted with, or the row was moved; "
                "nothing is lost: give the right key"
            ) from None
        end = _LENGTH_BYTES + int.from_bytes(plain[:_LENGTH_BYTES], "big")
        return plain[_LENGTH_BYTES:end].decode(), plain[end:]


def sealed(
    keys: OutboxKeys, id_: int, message_id: str, properties: str, body: bytes
) -> tuple[str, bytes]:
    """Properties and body of a row, encrypted."""
    return keys._seal(id_, message_id, properties, body)  # noqa: SLF001 - same module


def opened(
    keys: OutboxKeys | None, id_: int, message_id: str, properties: str, body: bytes
) -> tuple[str, bytes]:
    """Properties and body of a row, decrypted if they are encrypted.

    Raises:
        OutboxSealed: the key is missing, or is another one. The row stays as it is.
        ValueError: the name of the key is not what `sealed` writes.
    """
    if not properties.startswith(_MARK):
        return properties, body
    name = json.loads(properties)["$key"]
    if keys is None or name not in keys._ciphers:  # noqa: SLF001 - same module
        raise OutboxSealed(
            f"message {message_id} (row {id_}) is encrypted with key {name!r}, and that key was "
            "not given; nothing is lost: give it too"
        )
    return keys._unseal(name, id_, message_id, body)  # noqa: SLF001


def _bound_to(id_: int, message_id: str) -> bytes:
    return f"{id_}\0{message_id}".encode()


def _cipher() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
    except ImportError:
        msg = "an encrypted outbox needs cryptography: pip install 'reliablepub[encryption]'"
        raise ConfigurationError(msg) from None
    return AESGCM
