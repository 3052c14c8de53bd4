"""``reliablepub outbox rekey``: encrypts every message under the first key.

Knows: options and the report. Must never know: SQL or ciphers.
"""

from __future__ import annotations

import click

from reliablepub.cli.exits import Exit
from reliablepub.cli.options import inspected_option, json_option, relay_keys_options
from reliablepub.cli.output import count_of, print_error, print_json, print_result
from reliablepub.cli.progress import patiently
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.outbox.outbox import Outbox

_LISTED_MAX = 10


@click.command()
@inspected_option
@relay_keys_options
@json_option
def rekey(database: Database, outbox_keys: OutboxKeys | None, as_json: bool) -> int:  # noqa: FBT001 - click passes flags as arguments
    """Encrypt every message under the first key, so that older keys can be dropped.

    The command works in small steps, beside a relay that has the same keys. To rotate keys without
    downtime: add the new key at the end of every key file, and restart (or SIGHUP) every process;
    move it to the first line everywhere; run this command; remove the old key.

    \b
    Examples:
      reliablepub outbox rekey --outbox-keys keys --outbox outbox.db
      reliablepub outbox rekey --outbox-keys keys --accept-plaintext \\
        --outbox outbox.db

    \b
    Exit codes:
      0  done
      2  bad usage, or some messages were left as they are
      3  interrupted
      4  the outbox cannot be used, or a key is missing
    """  # noqa: D301 - click: keep these lines as they are
    if outbox_keys is None:
        raise click.UsageError("give --outbox-keys")
    with (
        patiently("encrypting messages"),
        Outbox(database, keys=outbox_keys) as outbox,
    ):
        result = outbox.rekey()
    if as_json:
        left = {str(id_): reason for id_, reason in result.left.items()}
        print_json({"changed": result.changed, "left": left})
    else:
        print_result(f"{count_of(result.changed, 'message')} encrypted under the first key")
    for id_, reason in list(result.left.items())[:_LISTED_MAX]:
        print_error(f"message {id_} left as it is: {reason}")
    if len(result.left) > _LISTED_MAX:
        print_error(f"{len(result.left) - _LISTED_MAX} more left as they are; --json lists them")
    return Exit.BAD_INPUT if result.left else Exit.CONFIRMED
