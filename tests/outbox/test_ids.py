"""Ids that nobody else has: of version 4, and not a child's either."""

import multiprocessing
import uuid
from multiprocessing.connection import Connection

import pytest

from reliablepub.outbox.ids import new_id


def test_ids_are_uuids_of_version_4() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    for id_ in ids:
        parsed = uuid.UUID(id_)
        assert (parsed.version, parsed.variant, str(parsed)) == (4, uuid.RFC_4122, id_)


def in_the_child(there: Connection) -> None:
    there.send([new_id() for _ in range(100)])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_others() -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=in_the_child, args=(there,))
    child.start()
    theirs, ours = here.recv(), [new_id() for _ in range(100)]
    child.join()
    assert not set(theirs) & set(ours)
