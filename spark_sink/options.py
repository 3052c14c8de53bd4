"""The parser of options: Spark's strings to `Settings`, and the option table to Markdown.

Knows: how options are written. Must never know: DataFrames, connections.

Spark passes options as strings with lower-case names. Case and underscores in a name are ignored
(``routingKey`` is ``routing_key``). A name that is not in the table is an error, because an option
that is silently ignored loses messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from reliablepub import ConfigurationError, InvalidMessage, Message
from spark_sink.settings import TABLE, Settings

SPARKS_OWN: Final = ("checkpointlocation", "queryname")
"""Options of a streaming query that Spark passes on to its sink."""
NEEDS_USER: Final = "a separate password needs a URL with a user and no password: amqp://user@host/"
_PROPERTIES: Final = {field.name for field in fields(Message)} & {option.name for option in TABLE}
"""Options that give every message a property."""
_SECRETS: Final = {"client_secret", "sig"}
"""Parameters of a file system's URI that hold a secret (Azure)."""
_FILE_NAME: Final = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._=@+-]{0,99})?")
"""No colon: Spark cannot read a file with one in its name, nor then the rest of the report."""
_NO_PATH: Final = (
    "save() takes no path here: for a queue write .option('routing_key', its name).save(), for an "
    "exchange .option('exchange', its name).save()"
)


def parse(options: Mapping[str, str]) -> Settings:
    """Check the options of a write.

    Args:
        options: as Spark passes them.

    Raises:
        ConfigurationError: with every problem found, and no value that could be a secret.
    """
    known = {_key(option.metadata["name"]): option for option in TABLE}
    values: dict[str, Any] = {}
    problems = []
    for given, text in options.items():
        key = _key(given)
        if key in SPARKS_OWN:
            continue
        if key == "path":
            problems.append(_NO_PATH)
            continue
        if key not in known:
            problems.append(f"there is no option {given!r}{_did_you_mean(key)}")
            continue
        option = known[key]
        if option.name in values:
            problems.append(f"option {option.metadata['name']!r} is given twice")
        try:
            values[option.name] = option.metadata["parse"](text)
        except ValueError as error:
            problems.append(f"option {option.metadata['name']!r} {error}")
    settings = Settings(**values) if not problems else None
    if settings is not None:
        problems = _contradictions(settings)
    if settings is None or problems:
        raise ConfigurationError("; ".join(problems))
    return settings


def check_stream(settings: Settings) -> None:
    """Refuse an option that is for batch writes.

    Raises:
        ConfigurationError: ``writeId`` is given.
    """
    if settings.write_id is not None:
        raise ConfigurationError(
            "option 'writeId' is for batch writes; a stream is identified by its checkpoint"
        )


def _contradictions(settings: Settings) -> list[str]:
    """Problems of options that are valid one by one and contradict each other."""
    problems = []
    if settings.url is not None and settings.url_file is not None:
        problems.append("give 'url' or 'urlFile', not both")
    if settings.password_env is not None and settings.password_file is not None:
        problems.append("give 'passwordEnv' or 'passwordFile', not both")
    has_place = settings.password_env is not None or settings.password_file is not None
    if settings.url is not None and has_place and not have_users_alone(settings.url):
        problems.append(f"option 'url': {NEEDS_USER}")
    if settings.key_file is not None and settings.cert_file is None:
        problems.append("'keyFile' needs 'certFile'")
    if settings.url is not None and not _all_amqp(settings.url):
        problems.append(
            "option 'url' must be amqp://... or amqps://..., or a comma-separated list of these"
        )
    if settings.collects and settings.report is None:
        problems.append("'collect' needs the option 'report': the directory to keep the rows in")
    report = settings.report or "/"
    if not report.startswith("/") and "://" not in report:
        problems.append("option 'report' must be an absolute path or a URI: hosts share it")
    elif has_password(report) or _has_secret(report):
        problems.append(
            "option 'report' has a password in its URI, which Spark shows in plans: leave it out, "
            "and give it to the hosts as the file system's own libraries find it"
        )
    if settings.report is not None and not _FILE_NAME.fullmatch(settings.write_id or ""):
        problems.append(
            "option 'writeId' names files of 'report': at most 100 letters, digits and . _ - = @ "
            "+, and the first one a letter or a digit"
        )
    return [*problems, *_no_message(settings)]


def _no_message(settings: Settings) -> Iterator[str]:
    """Problems of values that no message can carry: they would make every row invalid."""
    for name in sorted(_PROPERTIES):
        value = getattr(settings, name)
        try:
            if value is not None:
                Message(b"", **{name: value})
        except InvalidMessage as error:
            yield f"option {name!r} {error.problem}"


def split_urls(urls: str) -> list[str]:
    """The URLs of a comma-separated list; a URL may itself name several hosts."""
    return [url.strip() for url in re.split(r",(?=\s*\w+://)", urls)]


def have_users_alone(urls: str) -> bool:
    """Whether each URL names a user and no password, so that a separate one can be put in."""
    try:
        users = [urlsplit(url).netloc.rpartition("@")[0] for url in split_urls(urls)]
    except ValueError:
        return False
    return all(user and ":" not in user for user in users)


def _all_amqp(urls: str) -> bool:
    try:
        return all(urlsplit(url).scheme in ("amqp", "amqps") for url in split_urls(urls))
    except ValueError:
        return False


def has_password(uris: str) -> bool:
    """Whether a URI, or one of a comma-separated list of URLs, holds a password."""
    try:
        return any(urlsplit(uri).password for uri in split_urls(uris))
    except ValueError:
        return False  # neither a file system nor a broker opens it


def _has_secret(uri: str) -> bool:
    """Whether the query of a file system's URI holds a secret."""
    try:
        return "://" in uri and bool(_SECRETS & parse_qs(urlsplit(uri).query).keys())
    except ValueError:
        return False  # no file system opens it


def _key(name: str) -> str:
    return name.lower().replace("_", "")


def _did_you_mean(key: str) -> str:
    names = {_key(option.metadata["name"]): option.metadata["name"] for option in TABLE}
    close = get_close_matches(key, names, n=1)
    if close:
        return f" (did you mean {names[close[0]]!r}?)"
    return f"; there are {', '.join(sorted(names.values()))}"


def as_markdown() -> str:
    """The table as the site shows it on the page of docs/spark.md."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for option in TABLE:
        default = "" if option.default in (None, ()) else f"`{_shown(option.default)}`"
        lines.append(f"| `{option.metadata['name']}` | {default} | {option.metadata['meaning']} |")
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
