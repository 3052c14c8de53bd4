"""The root group: finds commands, runs one, and prints every expected error as one line.

Knows: the names of the commands, built in or plugged in, and click. Must never know: what a command
does.

A built-in command is imported when it is called. Other commands come from the entry point group
``reliablepub.commands``; a command that cannot be loaded reports why, and the others still work.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from reliablepub.cli import loglines
from reliablepub.cli.commands import Exit, Failure, LazyGroup, docstring_of, tell_whole_sentence
from reliablepub.cli.config import PREFIX
from reliablepub.cli.output import print_error
from reliablepub.cli.passwords import without_passwords
from reliablepub.errors import OutboxError, PublisherClosed, RelayHeldUp, ReliablePubError
from reliablepub.version import installed_version

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUG_INS: Final = "reliablepub.commands"
_BUILT_IN: Final = {
    "doctor": "reliablepub.cli.doctor.command:doctor",
    "outbox": "reliablepub.cli.outbox:outbox",
    "publish": "reliablepub.cli.publish.command:publish",
    "relay": "reliablepub.cli.relay.command:relay",
    "shipped": "reliablepub.cli.shipped:shipped",
    "topology": "reliablepub.cli.topology:topology",
    "dashboard": "reliablepub.dashboard.command:dashboard",
    "watch": "reliablepub.cli.watch.command:watch",
}


class CommandLine(LazyGroup):
    """The root group: built-in commands and plug-ins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *_plug_ins()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command; None if no command has this name."""
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None:
            return built_in
        plug_in = _plug_ins().get(cmd_name)
        return None if plug_in is None else _load(plug_in)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; the error for ``explain`` names ``outbox explain``."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            group = self.get_command(ctx, "outbox")
            if isinstance(group, click.Group) and args[0] in group.list_commands(ctx):
                words = f"No such command {args[0]!r} (did you mean 'outbox {args[0]}'?)"
                raise click.UsageError(words, ctx) from None
            raise

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:  # noqa: ANN401 - click's
        """Parse the arguments; ``--help`` and ``--version`` print while that is done."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:
            raise click.exceptions.Exit(Exit.OPEN) from None

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's
        """Run the command; one whose output is no longer read ends as interrupted."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would end with 1, which stands for parked messages
            return Exit.OPEN

    def main(  # type: ignore[override]  # the base may return a value; this one always exits
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **_: object
    ) -> NoReturn:
        """Run the command line and exit with its code."""
        _prepare_streams()
        _silence()
        code = self._run(args, prog_name or "reliablepub")
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # the interpreter would try again, and end with another code
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(code)

    def _run(self, args: Sequence[str] | None, prog_name: str) -> int:
        try:
            result = super().main(args, prog_name, standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            return Exit.BAD_INPUT
        except (click.ClickException, click.Abort, ReliablePubError, OSError) as error:
            text, code = _ending(error)
            variables = [value for name, value in os.environ.items() if name.startswith(PREFIX)]
            given = [*(sys.argv[1:] if args is None else args), *variables]
            print_error(without_passwords(text, given))
            return code
        finally:
            loglines.STDERR.is_service = False
            if loglines.STDERR.is_json and sys.exc_info()[0] is None:  # else the hook prints a bug
                loglines.use("text")
        return result if isinstance(result, int) else Exit.CONFIRMED


def _ending(error: Exception) -> tuple[str, int]:  # noqa: PLR0911 - a kind of error each
    """The error line and the exit code for an exception that ends a command."""
    match error:
        case Failure():
            return error.message, error.code
        case click.UsageError():
            hint = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
            if isinstance(error, click.MissingParameter) and error.param is not None:
                variable = error.param.envvar
                hint = f", or the variable {variable}{hint}" if variable else hint
            return error.format_message().rstrip(".") + hint, Exit.BAD_INPUT
        case click.ClickException():
            return error.format_message(), error.exit_code
        case click.Abort():
            return "interrupted", Exit.OPEN
        case OutboxError() | PublisherClosed() | RelayHeldUp():
            # A relay fails when it loses its outbox, or through a bug or a hook that does not
            # return. Messages stay in the outbox.
            return str(error), Exit.OUTBOX
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}", Exit.BAD_INPUT
        case _:
            return str(error), Exit.BAD_INPUT


def _plug_ins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - a built-in command needs none

    return {found.name: found for found in entry_points(group=PLUG_INS)}


def _load(plug_in: EntryPoint) -> click.Command:
    """The command of an entry point.

    If it cannot be loaded: a stand-in of the same name, whose help and error say why.
    """
    try:
        command = plug_in.load()
        if isinstance(command, click.Command):
            command.help = command.help or docstring_of(command.callback)
            tell_whole_sentence(command)
            return command
        problem = f"{plug_in.value} is not a click command"
    except Exception as error:  # noqa: BLE001 - importing a plug-in can raise anything
        problem = f"{type(error).__name__}: {error}"
    message = f"the command {plug_in.name!r} cannot be loaded ({problem})"

    def fail(**_: object) -> NoReturn:
        raise Failure(message, Exit.BAD_INPUT)

    said = f"(cannot be loaded: {problem})"
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(plug_in.name, callback=fail, help=said, context_settings=settings)


def _prepare_streams() -> None:
    """Open ``/dev/null`` for a standard stream that is closed, and let none refuse a character.

    Else the next file or socket would get the stream's descriptor. With PYTHONUNBUFFERED, stdout is
    opened with a buffer, which writes the rest when the system takes only a part of a write.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            stream = open(fd, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        if isinstance(sys.stdout.buffer, io.RawIOBase):
            fd, encoding = sys.stdout.fileno(), sys.stdout.encoding
            sys.stdout = open(fd, "w", encoding=encoding, closefd=False)  # noqa: SIM115
        sys.stdout.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Keep log lines off the terminal.

    The commands print what matters in them themselves, from `Status.reason`.
    """
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    ours = logging.getLogger("reliablepub")
    if not ours.handlers:
        ours.addHandler(logging.NullHandler())


def _print_version(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    unknown = "(not installed, so its version is not known)"
    click.echo(f"reliablepub {installed_version() or unknown}")
    ctx.exit()


@click.command(
    cls=CommandLine, table=_BUILT_IN, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(  # not click's own, which would look the version up for each command
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
def main() -> None:
    """Publish messages to RabbitMQ, and store them until they are confirmed.

    A stored message is sent until the broker confirms it. A message that the broker keeps refusing
    is parked in the outbox, with the reason. It is never silently lost. It may arrive more than
    once, under the same message id.

    \b
    Example:
      reliablepub publish flights.ndjson --exchange flights \\
        --routing-key 'flight.{carrier}.{dest}' --outbox outbox.db \\
        --url amqp://guest:guest@localhost/

    \b
    Exit codes of every command; where several apply, the first one counts:
      4  the outbox cannot be used or has a problem, the disk is full, or the
         relay has failed
      2  bad input, usage or configuration, or a problem with the broker
      1  some messages were given up (parked) or are damaged
      3  not finished: messages are open or in flight, or the command was
         interrupted
      0  done
    """
