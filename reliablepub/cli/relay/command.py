"""``reliablepub relay``: publishes the messages that other processes put into the outbox.

Knows: its options, and the report at the end. Must never know: how messages are published, or which
failures are logged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource
from tenacity import stop_after_delay, wait_exponential, wait_fixed

from reliablepub.cli import loglines
from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.link import describe
from reliablepub.cli.options import (
    Duration,
    alike,
    json_option,
    note_risks,
    outbox_as_given,
    publisher_options,
    publishing_options,
    tracing_hooks,
    tracing_option,
    urls_as_given,
)
from reliablepub.cli.output import (
    count_of,
    keeping_exit_code,
    print_either,
    print_error,
    print_note,
    same_outbox,
)
from reliablepub.cli.passwords import has_outbox_password
from reliablepub.cli.relay.service import Notifier, Service, Settings
from reliablepub.cli.signals import Stop
from reliablepub.errors import NotAnOutbox, OutboxError
from reliablepub.front.environment import OUTBOX_VARIABLE, URL_VARIABLE
from reliablepub.outbox.admin.inspection import read_due
from reliablepub.outbox.database import Database
from reliablepub.policy import Breaker, Retries, RetryPolicy
from reliablepub.printable import printable
from reliablepub.relay.status import Status
from reliablepub.transport.address import has_password

if TYPE_CHECKING:
    from reliablepub.observe.health import Exposition


def _keep(ctx: click.Context, arguments: list[str]) -> None:
    """Keep the arguments, which are parsed again after SIGHUP; but the log keeps its format."""
    if "reliablepub.arguments" not in ctx.meta:
        loglines.use(loglines.wanted(arguments, os.environ))
    ctx.meta["reliablepub.arguments"] = list(arguments)


_DRAINING: Final = replace(
    RetryPolicy.prompt(),
    breaker=RetryPolicy().breaker,
    # For a moment, so that a missing exchange is paused, and its messages are given up together:
    # each refused one costs a channel.
    unavailable=Retries(stop_after_delay(2.0), wait_fixed(1.0)),
)
"""The caller waits for the end; but what every message gets is still no fault of theirs."""


@command(
    before=_keep,
    has_variables=True,
    exits={
        0: (
            "stopped by a signal, or with --drain: nothing is left that may be sent now "
            "(messages that are parked or wait are reported)"
        ),
        2: "bad usage or configuration",
        3: (
            "--drain was interrupted while messages were open or while it stood by, or has left "
            "some in other shards; or a second signal ended the relay"
        ),
        4: (
            "the outbox cannot be used, another process relays it, --health-port cannot be opened, "
            "or the relay has failed"
        ),
    },
)
@publishing_options(
    required=True, outbox="The outbox; a missing file is created, but not with --drain."
)
@click.option(
    "--rate",
    "rate_max",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    help="Most messages per second that are sent; no limit unless given.",
)
@click.option(
    "--burst",
    "rate_burst",
    metavar="NUMBER",
    type=click.IntRange(min=1),
    help="With --rate, how many messages may be sent at once after an idle period; by default one "
    "second's worth.",
)
@alike(
    {
        "--nacked-for": "How long to retry a message that its queue nacks, for example because "
        "it is full, before the message is parked: 24h unless given.",
        "--returned-for": "How long to retry a message that no binding routes to a queue, "
        "before it is parked: 15m unless given.",
        "--unavailable-for": "How long to retry a message whose exchange does not exist (404), "
        "or may not be written to (403), before the message is parked: 24h unless given.",
        "--pause-max": "The longest pause of a destination that keeps refusing, before the "
        "next message is sent as a probe: 15m unless given.",
    },
    metavar="TIME",
    type=Duration(),
)
@click.option(
    "--confirm-timeout",
    "confirm_timeout_s",
    metavar="TIME",
    type=Duration(),
    default="30s",
    show_default=True,
    help="How long a confirm may take before the message is sent again on a new channel.",
)
@click.option(
    "--keep-confirmed",
    "keep_confirmed_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How long confirmed messages stay in the outbox, for inspection.",
)
@click.option(
    "--name",
    metavar="TEXT",
    help="Value of the label `outbox` in /metrics; the value of --outbox unless given.",
)
@click.option(
    "--health-port",
    metavar="PORT",
    type=click.IntRange(0, 65_535),
    help="Answer GET /live, /ready and /metrics over HTTP; 0 takes any free port.",
)
@click.option(
    "--health-host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address that --health-port listens on; other machines cannot reach the default.",
)
@tracing_option
@click.option("--drain", is_flag=True, help="End once no message is open that may be sent now.")
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another relay owns the outbox, and take over when it ends.",
)
@click.option(
    loglines.FLAG,
    type=click.Choice(loglines.FORMATS),
    default=loglines.FORMATS[0],
    show_default=True,
    expose_value=False,  # read before click parses the arguments
    help="Format of the lines on stderr, errors in these options included. json: one object per "
    "line, with time, level, logger, event, text and the fields of the event; it implies --json.",
)
@json_option
@click.pass_context
def relay(  # noqa: PLR0917 - one argument for each option
    ctx: click.Context,
    /,
    urls: tuple[str, ...],
    database: Database,
    name: str | None,
    health_port: int | None,
    health_host: str,
    tracing: bool,
    drain: bool,
    standby: bool,
    as_json: bool,
    **_: object,  # read by `_settings`, again after SIGHUP
) -> int:
    """Publish the messages in an outbox, and those stored later.

    An outbox has one relay at a time; any number of processes may store messages. Each change of
    the connection is a line on stderr. SIGTERM and SIGINT stop sending, wait up to a second for the
    confirms of messages in flight, and end; open messages stay in the outbox. SIGHUP reads the
    configuration, the password and the keys again, and reconnects. Under systemd the relay reports
    its state and feeds the watchdog (`reliablepub shipped` prints a unit).

    \b
    Examples:
      reliablepub relay --outbox outbox.db --url amqp://guest:guest@localhost/
      reliablepub relay --outbox outbox.db --url ... --drain
      reliablepub relay --config /etc/reliablepub/orders.toml --health-port 9108
    """
    if drain and not database.exists():
        raise NotAnOutbox(f"there is no outbox {database.name}, so there is nothing to drain")
    begun = time.monotonic()
    settings = _settings(ctx)
    with Stop(reopens=True) as stop:
        if not drain:
            loglines.STDERR.is_service = True
            _warn_of_passwords(ctx)
        note_risks(urls, database)
        hooks: list[object] = []
        expose: Callable[[str], Exposition] | str = ""
        if health_port is not None:
            hooks, expose = _metrics(name or printable(database.name), database)
        hooks += tracing_hooks(is_wanted=tracing)
        service = Service(
            settings,
            lambda: _reread(ctx),
            stop=stop,
            notifier=Notifier(os.environ),
            hooks=hooks,
            is_standby=standby,
            waits=not drain,
        )
        # The health port comes first: one that is taken ends the command before it relays.
        health = _healthy(service, health_host, health_port, expose)
        with health, loglines.records(), service:
            service.run(is_draining=drain)
    is_json = as_json or loglines.STDERR.is_json
    status = service.status
    shards, open_, due = 1, status.open, 0
    if drain and not stop.is_set and database.file is None:
        with suppress(OutboxError):  # what this relay has done is told all the same
            shards, open_, due = read_due(database)
    with keeping_exit_code():
        _report(database.name, service, time.monotonic() - begun, open_, as_json=is_json)
    if drain and service.standing_by:
        print_error(f"interrupted while {service.standing_by}")
        return Exit.OPEN
    if shards > 1 and due:
        return _left_in_shards(shards, due)
    return _drained(status, is_done=not stop.is_set) if drain and status.open else Exit.CONFIRMED


def _settings(ctx: click.Context) -> Settings:
    values = ctx.params
    options = publisher_options(ctx)
    options["keep_confirmed_s"] = values["keep_confirmed_s"]
    options["rate_max"] = values["rate_max"]
    options["rate_burst"] = values["rate_burst"]
    options["retry"] = _policy(values)
    options["confirm_timeout_s"] = values["confirm_timeout_s"]
    return Settings(
        urls=urls_as_given(ctx),
        outbox=values["database"],
        options=options,
        outbox_as_given=outbox_as_given(ctx) or "",
    )


def _policy(values: Mapping[str, Any]) -> RetryPolicy:
    """The retry policy of a relay: the default, or that of a drain, but for what is given."""
    policy, usual = _DRAINING if values["drain"] else RetryPolicy(), RetryPolicy().nacked
    given: dict[str, Any] = {}
    for name in ("nacked", "returned", "unavailable"):
        if (lasts_s := values[f"{name}_for"]) is not None:
            budget = getattr(policy, name) or usual
            given[name] = replace(budget, stop=stop_after_delay(lasts_s))
    if (pause_s := values["pause_max"]) is not None:
        given["breaker"] = Breaker(pause=wait_exponential(multiplier=1, max=pause_s))
    return replace(policy, **given)


def _reread(ctx: click.Context) -> Settings:
    """Parse the same arguments again, which reads the configuration, password and keys files."""
    arguments = list(ctx.meta["reliablepub.arguments"])
    with ctx.command.make_context(ctx.info_name, arguments, parent=ctx.parent) as again:
        return _settings(again)


def _warn_of_passwords(ctx: click.Context) -> None:
    """Warn of a password in the arguments: every local user can list them while the relay runs."""
    seen = "warning: every user of this machine can see a password in {} (ps); use {}"
    urls, outbox = urls_as_given(ctx), outbox_as_given(ctx) or ""
    if ctx.get_parameter_source("urls") is ParameterSource.COMMANDLINE and any(
        has_password(url) and ":guest@" not in url for url in urls
    ):
        print_note(seen.format("--url", f"--password-file or {URL_VARIABLE}"))
    is_given = ctx.get_parameter_source("database") is ParameterSource.COMMANDLINE
    if is_given and has_outbox_password(outbox):
        print_note(seen.format("--outbox", f"~/.pgpass, PGPASSWORD or {OUTBOX_VARIABLE}"))


def _metrics(name: str, outbox: Database) -> tuple[list[object], Callable[[str], Exposition] | str]:
    """The hook that counts and the function that renders its metrics.

    Without the extra ``observe``: no hook, and a text that says why.
    """
    try:
        from reliablepub.observe import metrics  # noqa: PLC0415 - an extra
    except ImportError as error:
        return [], f"no metrics: {error}"
    return [metrics.Metrics(name, outbox=outbox)], metrics.exposition


@contextmanager
def _healthy(
    service: Service, host: str, port: int | None, expose: Callable[[str], Exposition] | str
) -> Iterator[None]:
    if port is None:
        yield
        return
    from reliablepub.observe.health import Health, HealthServer  # noqa: PLC0415 - only where asked for

    try:
        server = HealthServer(host, port, Health(lambda: service.status), expose)
    except OSError as error:
        problem = f"cannot listen on {host} port {port} for --health-port: {error.strerror}"
        # Not BAD_INPUT, after which a service manager gives up: the port may be free again soon,
        # and the address may be there once the network is up.
        raise Failure(problem, Exit.OUTBOX) from None
    with server:
        metrics = expose if isinstance(expose, str) else "/metrics"
        print_note(f"health: {server.url}/live, /ready, {metrics}", event="health")
        yield


def _report(outbox: str, service: Service, seconds: float, open_: int, *, as_json: bool) -> None:
    counters, last = service.status.counters, service.last
    # An operator may have put parked messages back meanwhile, so the difference can be negative.
    confirmed, parked = service.confirmed, max(0, service.parked)
    values = {
        "outbox": outbox,
        "confirmed": confirmed,
        "parked": parked,
        "open": None if service.standing_by else open_,
        "seconds": round(seconds, 3),
        "link": last.link.value,
        "reason": last.reason,
    }
    left = "" if service.standing_by else f", {open_} open"
    words = f"{confirmed} confirmed, {parked} parked{left} in {seconds:.1f} s"
    text = f"{outbox}: {words} ({service.standing_by or describe(last)})"
    print_either(values, text, as_json=as_json)
    if counters.parked and not as_json:
        are = "is" if counters.parked == 1 else "are"
        print_note(
            f"{count_of(counters.parked, 'message')} {are} parked; "
            f"see `reliablepub outbox list --state parked {same_outbox(outbox)}`"
        )


def _drained(status: Status, *, is_done: bool) -> Exit:
    """Say what ``--drain`` has left open, and why."""
    if not is_done:
        print_error(f"interrupted; {_still_open(status)}")
        return Exit.OPEN
    is_one = status.open == 1
    wait, were = ("it waits for its", "was") if is_one else ("they wait for their", "were")
    print_note(
        f"{_still_open(status)}: {wait} time, or for an ordering key that a parked message holds, "
        f"or {were} stored while the relay ended; see `reliablepub outbox schedule` and "
        "`reliablepub outbox keys`"
    )
    return Exit.CONFIRMED


def _left_in_shards(shards: int, due: int) -> Exit:
    """Say that the outbox is not drained: a relay sends the messages of one shard only."""
    are = "is" if due == 1 else "are"
    print_error(
        f"the outbox has {shards} shards, and this relay has drained one of them; "
        f"{count_of(due, 'message')} that may be sent now {are} open in shards without a relay: "
        f"start {shards} times `reliablepub relay --drain` at once, or a relay for each shard"
    )
    return Exit.OPEN


def _still_open(status: Status) -> str:
    are, stay = ("is", "stays") if status.open == 1 else ("are", "stay")
    return f"{count_of(status.open, 'message')} {are} still open, and {stay} in the outbox"
