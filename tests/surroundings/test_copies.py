"""A copy made inside the process takes SQLite's locks away; nothing is lost by it."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from reliablepub import Outbox
from reliablepub.message import Message
from tests.sqlite import writer_of
from tests.surroundings.app import CALLS, RELAYING, App
from tests.surroundings.test_moved import ids_at

COPIES = {
    "the file": "import shutil; shutil.copy({0!r}, {0!r} + '.copy')",
    "the directory": "from tests.surroundings.app import copy_folder; copy_folder({0!r})",
}


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("door", [*RELAYING, "enqueue", "within", "within_anew"])
def test_another_process_that_closes_the_file_takes_nothing_with_it(
    tmp_path: Path, door: str, copy: str
) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "outbox.db"
    enqueue = "import sys, reliablepub as r; r.Outbox(sys.argv[1]).enqueue(r.Message(b''))"
    with App(door, path) as app:
        told = [app.round(), app.round(COPIES[copy].format(str(path)))]
        for _ in range(3):
            subprocess.run([sys.executable, "-c", enqueue, path], check=True)
            told.append(app.round())
    stored = {id_ for one in told for id_ in one.stored}
    assert stored <= ids_at(path), told
    if not door.startswith("within"):  # whose connection is the application's to open again
        assert len(stored) == 5 * CALLS, told


def test_a_lost_lock_is_noticed_and_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
        place = writer_of(outbox).opened().place
        assert place.is_locked
        os.close(os.open(path, os.O_RDONLY))
        assert not place.is_locked
        outbox.enqueue(Message(b""))
        assert writer_of(outbox).opened().place.is_locked
        assert outbox.status().open == 2
    assert "the locks on outbox" in caplog.text


def test_a_lost_lock_is_not_taken_again_by_closing_what_must_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outbox.db"
    with Outbox(path) as outbox:
        outbox.enqueue(Message(b""))
        connection = writer_of(outbox).opened()
        connection.is_unsure = True
        os.close(os.open(path, os.O_RDONLY))
        outbox.enqueue(Message(b""))
        assert writer_of(outbox).opened() is connection
    assert "it cannot be opened again before a commit succeeds" in caplog.text


def test_without_a_free_descriptor_a_lock_is_not_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Outbox(tmp_path / "outbox.db") as outbox:
        outbox.enqueue(Message(b""))
        place = writer_of(outbox).opened().place
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "open", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            )
            is_locked = place.is_locked
        assert is_locked
