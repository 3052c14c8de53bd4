"""Certificates made for a test, and a fake broker that has one.

Knows: openssl's command line, `FakeBroker`. Must never know: who connects.
"""

import ssl
import subprocess
from pathlib import Path
from typing import Any

from reliablepub.testing import FakeBroker


def signed(folder: Path, *names: str, days: int = 2) -> Path:
    """A file with a certificate for these names and its key; ``ca.crt`` beside it signed it."""
    path, certificate = folder / "both.pem", folder / "one.crt"
    new = ["openssl", "req", "-x509", "-days", str(days), "-nodes"]
    new += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    authority = [*new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt"]
    authority += ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 asks for it
    subprocess.run(authority, cwd=folder, check=True, capture_output=True)
    leaf = [*new, "-CA", "ca.crt", "-CAkey", "ca.key", "-subj", "/CN=leaf"]
    leaf += ["-addext", f"subjectAltName={','.join(names)}", "-addext", "basicConstraints=CA:FALSE"]
    leaf += ["-keyout", str(path), "-out", str(certificate)]
    subprocess.run(leaf, cwd=folder, check=True, capture_output=True)
    path.write_text(path.read_text() + certificate.read_text())
    return path


def broker_with(certificate: Path, *, asks: bool = False, **options: Any) -> FakeBroker:
    """Started, with a queue `q`; it speaks TLS only.

    Args:
        certificate: of `signed`.
        asks: whether clients must show a certificate of the same authority.
        options: further ones of the broker.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate.with_name("ca.crt"))
    broker = FakeBroker(tls=context, **options)
    broker.start()
    broker.declare_queue("q")
    return broker
