"""Ids are unique UUIDs of version 4, in a forked child too."""

import multiprocessing
import uuid
from multiprocessing.connection import Connection

import pytest

from reliablepub.outbox.entry import Mint, new_id


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


def test_a_beginning_by_chance_and_a_number_that_has_room_to_grow() -> None:
    ids = [uuid.UUID(mint.new_id()) for mint in (Mint() for _ in range(100))]
    assert {(id_.version, id_.variant) for id_ in ids} == {(4, uuid.RFC_4122)}
    heads = {str(id_)[:23] for id_ in ids}
    assert len(heads) == len(ids)
    for place in set(range(23)) - {8, 13, 14, 18, 19}:  # dashes, version, variant
        assert len({head[place] for head in heads}) > 1
    assert 2**46 < max(id_.node for id_ in ids) < 2**47


def test_they_are_counted() -> None:
    mint = Mint()
    first, second = (uuid.UUID(mint.new_id()) for _ in range(2))
    assert second.int == first.int + 1
