"""The input of ``reliablepub publish``: opened, checked as a whole where that is possible, named.

Knows: files. Must never know: what a record means, or what is done with it.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from reliablepub.cli.records import Recipe, read_lines
from reliablepub.cli.signals import Stop

STDIN: Final = "-"


@dataclass(slots=True)
class Source:
    """A file, or stdin, open for reading.

    Attributes:
        name: as the user wrote it.
        fd: its descriptor.
        is_regular: a file that can be read twice.
    """

    name: str
    fd: int
    is_regular: bool

    @classmethod
    def open(cls, name: str) -> Self:
        """Open it.

        Raises:
            OSError: it cannot be opened.
            IsADirectoryError: it is a folder.
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
        """To be closed at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it, unless it is stdin."""
        if self.name != STDIN:
            os.close(self.fd)

    def check(self, recipe: Recipe, stop: Stop) -> int:
        """Read it once, make every message, keep none; then go back to the beginning.

        Returns:
            how many records there are.

        Raises:
            BadRecord: the first that is not fit to be published.
        """
        count = 0
        for line in read_lines(self.fd, stop):
            if line is not None:
                recipe.message(line)
                count += 1
        os.lseek(self.fd, 0, os.SEEK_SET)
        return count

    def identity(self, recipe: Recipe) -> str:
        """A name for this content published in this way; a changed file is another source.

        When to send, or to give up, is no part of it: with another time the same file goes on too.
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
                "message_id": None,  # what has none, and no key, is named as it always was
                "is_ndjson": recipe.is_ndjson,
            }
            | given
        )
