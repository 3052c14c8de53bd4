"""``reliablepub publish``: its options, and the order of its steps.

Knows: the modules that read, publish and report, and the order in which they run. Must never know:
how they work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from typing import Any

import click

from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.options import (
    alike,
    json_option,
    moment,
    note_risks,
    publisher_options,
    publishing_options,
    tracing_hooks,
    tracing_option,
    urls_as_given,
)
from reliablepub.cli.output import keeping_exit_code, print_either, print_error, print_note, quoted
from reliablepub.cli.progress import Bar
from reliablepub.cli.publish.records import TEXTS, BadRecord, Recipe, Source
from reliablepub.cli.publish.run import RELAY_GONE, Patience, Run, Stopped
from reliablepub.cli.publish.summary import Summary
from reliablepub.cli.publish.template import Template, TemplateError
from reliablepub.cli.signals import Stop
from reliablepub.errors import OutboxInUse
from reliablepub.front.options import PublisherOptions
from reliablepub.front.publisher import Publisher
from reliablepub.message import Message
from reliablepub.outbox.admin.inspection import read_relays
from reliablepub.outbox.database import Database
from reliablepub.outbox.outbox import Outbox
from reliablepub.policy import RetryPolicy

_FORMATS = {"auto": None, "ndjson": True, "lines": False}


def _template(ctx: click.Context, param: click.Parameter, text: str | None) -> Template | None:
    if text is None:
        return None
    try:
        return Template(text)
    except TemplateError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@command(
    has_variables=True,
    exits={
        0: "every message is confirmed",
        1: (
            "some messages were given up, perhaps those of the run that was resumed; an outbox "
            "keeps them parked, with the reason"
        ),
        2: "bad input, usage or configuration; nothing was stored, or the error says how much",
        3: "messages are open (`reliablepub relay` publishes those in an outbox), or interrupted",
        4: "the outbox cannot be used, the disk is full, or the relay has failed",
    },
)
@click.argument("file", metavar="FILE|-", type=click.Path())
@alike(
    {
        "--exchange": "Exchange to publish to; empty is the default exchange, which routes to the "
        "queue that the routing key names.",
        "--routing-key": "Routing key, such as 'flight.{carrier}.{dest}'.",
        "--message-id": "Message id, such as '{id}'; random unless given.",
        "--ordering-key": "Ordering key, such as '{order}': messages of one key are sent one after "
        "the other, in the order of their records.",
    },
    metavar="TEMPLATE",
    callback=_template,
)
@click.option(
    "--expires-in",
    "expires_in_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Give up a message that is not confirmed within this time after it was stored. Without "
    "it no message expires.",
)
@click.option(
    "--not-before",
    callback=moment,
    metavar="WHEN",
    help="Send nothing before this time, such as 2026-12-24T18:00:00+01:00. Needs --outbox, where "
    "the messages wait; `reliablepub relay` publishes them.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(list(_FORMATS)),
    default="auto",
    show_default=True,
    help="ndjson: one JSON object per line; lines: any text; auto: ndjson if the first record "
    "starts with {.",
)
@publishing_options(
    required=False,
    outbox="The outbox: messages are stored here first, and stay if they cannot be published now. "
    "Without it messages are in memory only, and those not confirmed at the end are not kept.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Stop waiting when no message was settled for this long. The wait for the first "
    "connection is at most 10 s.",
)
@tracing_option
@json_option
def publish(  # noqa: PLR0917 - one argument for each option
    file: str,
    expires_in_s: float | None,
    not_before: datetime | None,
    format_: str,
    urls: tuple[str, ...],
    database: Database | None,
    window_max: int,
    timeout_s: float,
    tracing: bool,
    as_json: bool,
    **others: Any,  # noqa: ANN401 - the templates, and what `publisher_options` reads
) -> int:
    """Publish the records of a file, one message for each line that is not blank.

    The body is the line without its line end. A TEMPLATE is text that may contain fields of the
    record: {carrier}, {airport.code}; {{ and }} are braces. The whole file is checked before
    anything is stored. If a run with an outbox did not finish, the same command resumes where it
    stopped.

    \b
    Examples:
      reliablepub publish flights.ndjson --exchange flights \\
        --routing-key 'flight.{carrier}.{dest}' --outbox outbox.db \\
        --url amqp://guest:guest@localhost/
      tail -f app.log | reliablepub publish - --routing-key logs --url ...
    """
    templates = {name: others[name] for name in TEXTS if others[name] is not None}
    if not any(name in templates and templates[name].text for name in ("exchange", "routing_key")):
        raise click.UsageError("give --routing-key, --exchange or both")
    if not_before is not None and database is None:
        raise click.UsageError("--not-before needs --outbox, where the messages wait")
    recipe = Recipe(
        templates,
        _FORMATS[format_],
        expires_in_s,
        not_before,
        check=None if database is None or database.file is not None else partial(_fits, database),
    )
    if recipe.is_ndjson is False:
        _refuse_fields(templates.values())
    ctx = click.get_current_context()
    open_messages_max = None if database is not None else max(4 * window_max, 2_000)
    options = publisher_options(ctx) | PublisherOptions(
        retry=RetryPolicy.prompt(),  # the user waits for the result
        # `Run` itself waits for room in memory, because it heeds signals and --timeout.
        open_messages_max=open_messages_max,
        open_bytes_max=None if database is not None else 1 << 30,
        full_timeout_s=timeout_s,
        hooks=tracing_hooks(is_wanted=tracing),
    )
    open_publisher = partial(Publisher, urls_as_given(ctx), outbox=database, **options)
    note_risks(urls, database)
    with Stop() as stop, _open(file) as source:
        summary = _publish(
            source,
            recipe,
            open_publisher,
            outbox=database,
            open_messages_max=open_messages_max,
            timeout_s=timeout_s,
            stop=stop,
        )
    _print(summary, as_json=as_json)
    return summary.exit


def _print(summary: Summary, *, as_json: bool) -> None:
    for line in summary.problems():
        print_error(line)
    with keeping_exit_code():
        print_either(summary.as_json(), summary.headline(), as_json=as_json)


def _refuse_fields(templates: Iterable[Template]) -> None:
    for template in templates:
        if template.fields:
            raise click.UsageError(
                f"{template.text!r} takes fields from the records, which plain lines do not have"
            )


def _open(file: str) -> Source:
    try:
        return Source.open(file)
    except OSError as error:
        raise Failure(f"cannot read {file}: {error.strerror}", Exit.BAD_INPUT) from None


def _publish(
    source: Source,
    recipe: Recipe,
    open_publisher: Callable[[], Publisher],
    *,
    outbox: Database | None,
    open_messages_max: int | None,
    timeout_s: float,
    stop: Stop,
) -> Summary:
    if outbox is not None and source.is_regular:
        _refuse_shards(outbox, source)
    records = _check(source, recipe, stop)
    name = None if records is None or outbox is None else source.identity(recipe)
    begun = time.monotonic()
    try:
        publisher = open_publisher()
    except OutboxInUse as error:
        raise Failure(f"{error}; or give `publish` a separate outbox", Exit.OUTBOX) from None
    with ExitStack() as stack:
        stack.callback(_end, publisher)
        # The position cannot change meanwhile: this process relays the outbox, as its only shard.
        done = 0 if outbox is None or name is None else Outbox(outbox).position(name)
        if records is not None and done > records:
            raise Failure(_stored_twice(source, done, records), Exit.OUTBOX)
        if done:
            print_note(_resuming(done, records))
        bar = stack.enter_context(Bar(None if records is None else records - done))
        run = Run(
            publisher,
            source=name,
            resumes=done > 0,
            open_messages_max=open_messages_max,
            stop=stop,
            bar=bar,
            patience=Patience(timeout_s, begun),
            not_before=recipe.not_before,
            count_waiting=lambda: 0 if outbox is None else Outbox(outbox).status().waiting,
        )
        run.run(source.lines(stop, done=done), recipe.message)
    is_all_stored = records is not None and done + run.tally.stored >= records
    # After a stop, the position stays while messages are open: the same command would publish them
    # again, under new ids.
    is_finished = run.stopped in {None, Stopped.NOT_DUE} or not run.has_open
    has_ended = is_all_stored and is_finished and run.stopped is not Stopped.OUTBOX
    if has_ended and outbox is not None and name is not None:
        # The next run publishes the file again.
        with run.recording(), Outbox(outbox) as opened:
            opened.forget(name)
    return Summary(
        source=source.name,
        outbox=None if outbox is None else outbox.name,
        records=source.count if records is None else records,
        resumed_at=done + 1 if done else None,
        tally=run.tally,
        status=publisher.status,
        last_link=run.last_link,
        stopped=run.stopped,
        error=run.error,
        seconds=time.monotonic() - begun,
        is_all_read=run.is_all_read,
        is_stream=not source.is_regular,
    )


def _end(publisher: Publisher) -> None:
    """Close the publisher, which `Run` has done unless another error came first."""
    with suppress(*RELAY_GONE):  # `Run` has recorded it, or the other error matters more
        publisher.close()


def _fits(outbox: Database, message: Message) -> None:
    """Check that a server can store the message; a file can store any."""
    outbox.check_texts({name: getattr(message, name) for name in TEXTS})


def _refuse_shards(outbox: Database, source: Source) -> None:
    """Refuse a file for an outbox with several shards."""
    if outbox.file is not None or not outbox.exists():  # a file has one shard, and so has a new one
        return
    shards = len(read_relays(outbox))
    # Each run owns one shard, but all shards share the position in the file: two runs side by side
    # would add up what they store, and the next would skip records that neither has stored.
    if shards > 1:
        raise Failure(
            f"outbox {outbox.name} has {shards} shards, where the position in a file cannot be "
            "kept, so `publish` takes no file; give it a separate outbox with one shard, or "
            f"stdin, which is not resumed: - < {quoted(source.name)}; nothing was stored",
            Exit.BAD_INPUT,
        )


def _stored_twice(source: Source, done: int, records: int) -> str:
    return (
        f"the outbox has {done} stored records of {source.name}, which has {records}: several runs "
        "have stored them at once, and some may be missing; to publish the whole file again, "
        f"run `touch {quoted(source.name)}` and the same command"
    )


def _check(source: Source, recipe: Recipe, stop: Stop) -> int | None:
    """Check every record of a regular file before anything is stored; return their number."""
    if not source.is_regular:
        return None  # it can be read only once
    try:
        records = source.check(recipe, stop)
    except BadRecord as error:
        raise Failure(f"{source.name}, {error}; nothing was stored", Exit.BAD_INPUT) from None
    if stop.is_set:
        raise Failure("interrupted while checking; nothing was stored", Exit.OPEN)
    return records


def _resuming(done: int, records: int | None) -> str:
    if done == records:
        return f"all {done} records were stored by a run that did not finish; none is left to store"
    return f"resuming at record {done + 1}: {done} were stored by a run that did not finish"
