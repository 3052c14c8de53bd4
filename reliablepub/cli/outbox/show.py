"""``reliablepub outbox show``: shows a message with its properties, headers and body.

Knows: how a body of text or bytes is shown. Must never know: SQL, or a broker.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from reliablepub.cli.choosing import rows_named, unknown
from reliablepub.cli.commands import Exit, Failure, command
from reliablepub.cli.options import inspected_option, json_option, keys_option
from reliablepub.cli.output import (
    ago,
    new_file,
    print_json,
    print_note,
    print_result,
    print_table,
    print_text,
    size_of,
)
from reliablepub.outbox.admin.inspection import Contents, read_contents, read_original
from reliablepub.outbox.database import Database
from reliablepub.outbox.encryption import OutboxKeys
from reliablepub.printable import one_line

SHOWN_BYTES: Final = 4_096
"""Length of the part of a body that is printed; ``--body-out`` writes the whole body."""
_HEX_LINE: Final = 16
_GIVE_KEYS: Final = "give the keys of the outbox (--outbox-keys FILE)"


@command(
    exits={
        2: "bad usage, the message is not (or no longer) in the outbox, or the --body-out file "
        "exists",
        4: "the outbox cannot be used, or --body-out is given and the message's key is missing",
    },
)
@click.argument("name", metavar="ID")
@inspected_option
@click.option(
    "--body-out",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the body, byte for byte, into a new file, readable by you alone.",
)
@click.option(
    "--original", "is_original", is_flag=True, help="Show the message as it was before its edit."
)
@keys_option
@json_option
def show(
    *,
    name: str,
    database: Database,
    body_out: Path | None,
    is_original: bool,
    outbox_keys: OutboxKeys | None,
    as_json: bool,
) -> None:
    """Show a message: address, properties, headers and body.

    ID is the number of a row, a message id, a key of Outbox.enqueue, or a correlation id. A body of
    text or JSON is printed as text, any other in hexadecimal; of each, the first 4 KiB. An
    encrypted message can be shown only with its key (--outbox-keys).

    \b
    Examples:
      reliablepub outbox show 17 --outbox outbox.db
      reliablepub outbox show 17 --outbox-keys keys --outbox outbox.db
      reliablepub outbox show 17 --body-out body.bin --outbox outbox.db
    """
    found = _found(name, database, outbox_keys, read_original if is_original else read_contents)
    if body_out is not None:
        if found.is_sealed:
            raise Failure(f"nothing was written: {found.problem}; {_GIVE_KEYS}", Exit.OUTBOX)
        with new_file(body_out) as file:
            file.write(found.body)
    if as_json:
        print_json(_values(found))
        return
    print_table({name: value for name, value in _head(found).items() if value not in (None, "")})
    if found.problem:
        print_note(f"warning: {found.problem}")
    if found.is_sealed:
        print_note(f"to see its properties and body, {_GIVE_KEYS}")
    elif body_out is None:
        _print_body(found)
    else:
        print_note(f"{size_of(len(found.body))} written to {body_out}")


def _found(
    name: str,
    database: Database,
    keys: OutboxKeys | None,
    read: Callable[[Database, int, OutboxKeys | None], Contents | None],
) -> Contents:
    """The message of this name; of several, the one of the highest row, with a note."""
    found = None
    rows = []
    for id_ in rows_named(database, (name,)):
        contents = read(database, id_, keys)
        if contents is not None:
            found = contents
            rows.append(id_)
    if len(rows) > 1:
        listed = ", ".join(map(str, rows))
        print_note(
            f"{name} is the id of {len(rows)} messages (rows {listed}); this is row {rows[-1]}"
        )
    if found is not None:
        return found
    if read is read_original:
        raise Failure(f"message {name} has no original: it was not edited", Exit.BAD_INPUT)
    if name.isdigit():
        raise Failure(
            f"message {name} is no longer in {database.name}; `reliablepub outbox explain "
            f"{name}` shows its history",
            Exit.BAD_INPUT,
        )
    raise unknown(database, name)


def _values(found: Contents) -> dict[str, Any]:
    is_encoded = found.text is None and not found.is_sealed
    return {
        **found.columns,
        "properties": found.properties,
        "headers": found.headers,
        "is_encrypted": found.is_sealed,
        "body_bytes": len(found.body),
        "body": None if found.is_sealed else found.text,
        "body_base64": b64encode(found.body).decode() if is_encoded else None,
        "problem": found.problem,
    }


def _head(found: Contents) -> dict[str, object]:
    columns = found.columns
    has_doubt = columns.get("may_have_arrived") and columns["state"] != "confirmed"
    return {
        "id": columns["id"],
        "message id": columns["message_id"],
        "state": columns["state"],
        "exchange": columns["exchange"] or "(default)",
        "routing key": columns["routing_key"],
        "ordering key": columns["ordering_key"],
        "stored": ago(columns.get("stored_at")),
        "due": ago(columns.get("due_at")),
        "parked": ago(columns.get("parked_at")),
        "confirmed": ago(columns.get("confirmed_at")),
        "expires": ago(columns.get("expires_at")),
        "may have arrived": "yes" if has_doubt else None,
        **{name.replace("_", " "): one_line(str(v)) for name, v in found.properties.items()},
        **{f"header {name}": one_line(json.dumps(v)) for name, v in found.headers.items()},
        "size": size_of(columns["size"]) if "size" in columns else None,
        "body": size_of(len(found.body)) + ", encrypted" * found.is_sealed,
    }


def _print_body(found: Contents) -> None:
    print_result("")
    text = found.text
    if text is not None:
        print_text(text[:SHOWN_BYTES])
        is_cut = len(text) > SHOWN_BYTES
    else:
        for start in range(0, min(SHOWN_BYTES, len(found.body)), _HEX_LINE):
            part = found.body[start : start + _HEX_LINE]
            seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)  # noqa: PLR2004 - ASCII
            print_result(f"{start:08x}  {part.hex(' '):<47}  {seen}")
        is_cut = len(found.body) > SHOWN_BYTES
    if is_cut:
        print_note(f"the first {SHOWN_BYTES}; --body-out writes all of it")
