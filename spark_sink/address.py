"""Where the broker is, read on the executor, so that no password has to travel with a job.

Knows: environment variables, files, URLs. Must never know: the wire.

Spark shows options in plans, in its pages and in the event log, and the job itself is pickled. What
is named here by variable or file is read where it is used, and at every task: a password may
change.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from pyspark import SparkFiles

from reliablepub import ConfigurationError
from spark_sink.options import split_urls
from spark_sink.settings import Settings


def urls(settings: Settings) -> Sequence[str]:
    """The URLs of the broker, with the password that was named apart.

    Raises:
        ConfigurationError: a variable or file is missing; names it, and never what it holds.
    """
    given = split_urls(_given(settings))
    password = _password(settings)
    return given if password is None else [_with_password(url, password) for url in given]


def ssl_context(settings: Settings) -> ssl.SSLContext | None:
    """What the certificate options ask for; None for the system's authorities.

    Raises:
        ConfigurationError: a file is missing, or holds something else.
    """
    if settings.ca_file is None and settings.cert_file is None:
        return None
    try:
        ca = settings.ca_file and str(found("caFile", settings.ca_file))
        context = ssl.create_default_context(cafile=ca)
        if settings.cert_file is not None:
            key = settings.key_file and str(found("keyFile", settings.key_file))
            context.load_cert_chain(str(found("certFile", settings.cert_file)), key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"a certificate cannot be read: {error}") from None
    return context


def found(option: str, name: str) -> Path:
    """A file of this host, or one that Spark has brought here (``--files``, ``addFile``).

    Raises:
        ConfigurationError: it is neither.
    """
    path = Path(name)
    if not path.is_file() and path.name == name:
        path = _brought_by_spark(name)
    if not path.is_file():
        raise ConfigurationError(f"option {option!r}: there is no file {name} on this host")
    return path


def _brought_by_spark(name: str) -> Path:
    try:
        return Path(SparkFiles.get(name))
    except (AssertionError, AttributeError):  # there is no Spark in this process
        return Path(name)


def _given(settings: Settings) -> str:
    if settings.url is not None:
        return settings.url
    if settings.url_file is not None:
        return found("urlFile", settings.url_file).read_text().strip()
    url = os.environ.get(settings.url_env, "")
    if not url:
        raise ConfigurationError(
            f"no broker: give the option 'url' or 'urlFile', or set {settings.url_env} in the "
            f"environment of the executors (spark.executorEnv.{settings.url_env}). In SQL: INSERT "
            "INTO t WITH (`url` = '...'), since Spark keeps the OPTIONS of a table to itself"
        )
    return url


def _password(settings: Settings) -> str | None:
    if settings.password_file is not None:
        return found("passwordFile", settings.password_file).read_text().rstrip("\r\n")
    if settings.password_env is not None:
        password = os.environ.get(settings.password_env)
        if password is None:
            raise ConfigurationError(
                f"option 'passwordEnv': {settings.password_env} is not set in the environment of "
                "the executors"
            )
        return password
    return None


def _with_password(url: str, password: str) -> str:
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if not user or ":" in user:
        raise ConfigurationError(
            "a password of its own needs a user and no password in the URL: amqp://user@host/"
        )
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()
