"""OAuth 2 for tests: a signing key of their own, tokens, and a RabbitMQ that accepts them.

It must never know reliablepub.
"""

import base64
import json
import time

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.rabbitmq import ROOT, RabbitMQNode

RESOURCE = "rabbitmq"
PLUGIN = "rabbitmq_auth_backend_oauth2"
_SCOPES = tuple(f"{RESOURCE}.{right}:*/*" for right in ("configure", "read", "write"))


class Issuer:
    """Signs tokens, and writes down how many."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.issued = 0

    def token(self, lifetime_s: float, *, scopes: tuple[str, ...] = _SCOPES) -> str:
        """A JSON Web Token that expires in so many seconds; in whole seconds, rounded up."""
        self.issued += 1
        now = time.time()
        claims = {
            "sub": "orders",
            "client_id": "orders",
            "aud": [RESOURCE],
            "scope": list(scopes),
            "iat": int(now),
            "exp": int(now + lifetime_s + 0.999),
        }
        head = {"alg": "RS256", "typ": "JWT", "kid": "test"}
        signed = ".".join(_encoded(json.dumps(part).encode()) for part in (head, claims))
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_encoded(signature)}"

    @property
    def public_key(self) -> bytes:
        """The key with which RabbitMQ checks tokens, as PEM."""
        return self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )


def node_with_oauth(issuer: Issuer) -> RabbitMQNode:
    """A node that lets in both its own users and bearers of the issuer's tokens.

    Of the same version as the other tests' node.
    """
    return RabbitMQNode(
        root=ROOT,
        plugins=(PLUGIN,),
        config="auth_backends.1 = rabbit_auth_backend_internal\n"
        "auth_backends.2 = rabbit_auth_backend_oauth2\n"
        f"auth_oauth2.resource_server_id = {RESOURCE}\n"
        "auth_oauth2.default_key = test\n"
        "auth_oauth2.signing_keys.test = {folder}/issuer.pem\n",
        files={"issuer.pem": issuer.public_key},
    )


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
