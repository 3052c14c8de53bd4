"""The input of ``reliablepub publish``: opens, checks and identifies a file or stdin.

Knows: files. Must never know: what a record means, or what becomes of it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from reliablepub.cli.publish.records import Recipe, read_lines
from reliablepub.cli.signals import Stop

STDIN: Final = "-"


@dataclass(slots=True)
class Source:
    """A file, or stdin, open for reading.

    Attributes:
        name: the name as the user gave it; ``-`` for stdin.
        fd: the file descriptor.
        is_regular: whether it is a regular file, which can be read twice.
    """

    name: str
    fd: int
    is_regular: bool

    @classmethod
    def open(cls, name: str) -> Self:
        """Open a file, or stdin for ``-``.

        Raises:
            OSError: the file cannot be opened.
            IsADirectoryError: the name is a folder's.
        """
        if name == STDIN:
            return cls(name, 0, is_regular=False)
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            os.close(fd)
            raise IsADirectoryError(21, "is a folder", name)
        return cls(name, fd, is_regular=stat.S_ISREG(mode))

    def __enter__(self) -> Self:
        """Return the open source."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; stdin stays open."""
        if self.name != STDIN:
            os.close(self.fd)

    def check(self, recipe: Recipe, stop: Stop) -> int:
        """Make a message from every record, keeping none, and return to the start of the file.

        Returns:
            the number of records.

        Raises:
            BadRecord: a record cannot be published; the first one is reported.
        """
        count = 0
        for line in read_lines(self.fd, stop):
            if line is not None:
                recipe.message(line)
                count += 1
        os.lseek(self.fd, 0, os.SEEK_SET)
        return count

    def identity(self, recipe: Recipe) -> str:
        """A name for this file with these templates; a changed file has another name.

        ``--not-before`` and ``--expires-in`` are not part of the name: an interrupted run resumes
        with other times too.
        """
        found = os.fstat(self.fd)
        optional = {"message_id": recipe.message_id, "ordering_key": recipe.ordering_key}
        given = {name: template.text for name, template in optional.items() if template is not None}
        return json.dumps(
            {
                "path": str(Path(self.name).resolve()),
                "size": found.st_size,
                "mtime_ns": found.st_mtime_ns,
                "exchange": recipe.exchange.text,
                "routing_key": recipe.routing_key.text,
                "message_id": None,  # names stay those of versions without these two templates
                "is_ndjson": recipe.is_ndjson,
            }
            | given
        )
