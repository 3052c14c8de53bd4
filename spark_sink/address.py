"""The URL and credentials of the broker, read on the executor, so that no job carries a password.

Knows: environment variables, files, URLs. Must never know: AMQP.

Spark shows options in plans, in its pages and in the event log, and pickles the job. Variables and
files named by options are read where they are used: variables at every task, a password file at
every connection, because a password may change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from pyspark import SparkFiles

from reliablepub import CertificateFiles, ConfigurationError, PasswordFile
from spark_sink.options import NEEDS_USER, have_users_alone, split_urls
from spark_sink.settings import Settings


def urls(settings: Settings) -> Sequence[str]:
    """The URLs of the broker, with the password of ``passwordEnv`` put in.

    With ``passwordFile`` they hold no password: `credentials` reads it.

    Raises:
        ConfigurationError: a variable or file is missing; the text names it, never its content.
    """
    given = split_urls(_given(settings))
    if settings.password_file is not None:
        for url in given:
            _without_password(url)
    if settings.password_env is None:
        return given
    password = os.environ.get(settings.password_env)
    if password is None:
        raise ConfigurationError(
            f"option 'passwordEnv': {settings.password_env} is not set in the environment of the "
            "executors"
        )
    return [_with_password(url, password) for url in given]


def credentials(settings: Settings) -> PasswordFile | None:
    """The file of ``passwordFile``, read at each connection; None without that option.

    If it holds a token, the publisher renews it before it expires, so a task may outlive it.

    Raises:
        ConfigurationError: there is no such file.
    """
    if settings.password_file is None:
        return None
    return PasswordFile(found("passwordFile", settings.password_file))


def ssl_context(settings: Settings) -> CertificateFiles | None:
    """The files of the certificate options; None if there are none (system authorities).

    Raises:
        ConfigurationError: a file is missing, or is not a certificate or key.
    """
    options = (
        ("authorities", "caFile", settings.ca_file),
        ("certificate", "certFile", settings.cert_file),
        ("key", "keyFile", settings.key_file),
    )
    files = {name: found(option, file) for name, option, file in options if file is not None}
    return CertificateFiles(**files) if files else None


def found(option: str, name: str) -> Path:
    """Find a file on this host, or one that Spark distributed (``--files``, ``addFile``).

    Raises:
        ConfigurationError: there is no such file.
    """
    path = Path(name)
    # `Path.is_file` raises for a folder that this user may not enter.
    if not os.path.isfile(path) and path.name == name:  # noqa: PTH113
        path = _distributed_by_spark(name)
    if not os.path.isfile(path):  # noqa: PTH113
        raise ConfigurationError(f"option {option!r}: there is no file {name} on this host")
    return path


def _distributed_by_spark(name: str) -> Path:
    try:
        return Path(SparkFiles.get(name))
    except (AssertionError, AttributeError):  # no Spark in this process
        return Path(name)


def _given(settings: Settings) -> str:
    if settings.url is not None:
        return settings.url
    if settings.url_file is not None:
        try:
            return found("urlFile", settings.url_file).read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise ConfigurationError(
                f"option 'urlFile': {settings.url_file} cannot be read as text on this host"
            ) from None
    url = os.environ.get(settings.url_env, "")
    if not url:
        raise ConfigurationError(
            f"no broker: give the option 'url' or 'urlFile', or set {settings.url_env} in the "
            "environment of the executors. In SQL: INSERT INTO t WITH (`url` = '...'); Spark does "
            "not pass the OPTIONS of a table to a sink"
        )
    return url


def _with_password(url: str, password: str) -> str:
    parts = _without_password(url)
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}").geturl()


def _without_password(url: str) -> SplitResult:
    """The parts of a URL that names a user and no password."""
    if not have_users_alone(url):
        raise ConfigurationError(NEEDS_USER)
    return urlsplit(url)
