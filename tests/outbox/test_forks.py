"""What holds forks back, without a fork."""

import threading
import weakref
from collections.abc import Iterator

from reliablepub.outbox.sqlite.forks import Gate, Keeper


class Resting:
    """A keeper that has nothing to close."""

    def rest(self) -> None:
        pass


def test_a_keeper_that_comes_during_a_fork_does_not_stop_it() -> None:
    """An exception in a hook is ignored, and then no connection would be closed."""
    gate, keepers, late = Gate(), [Resting(), Resting()], Resting()
    adding = threading.Thread(target=gate.keep, args=(late,))

    class Interrupted(weakref.WeakSet[Keeper]):
        def __iter__(self) -> Iterator[Keeper]:
            for keeper in super().__iter__():
                if not adding.ident:
                    adding.start()
                    adding.join(0.2)  # it ends meanwhile, unless it waits
                yield keeper

    gate._keepers = Interrupted(keepers)
    gate._before()
    gate._after_in_parent()
    adding.join()
    assert late in gate._keepers
