"""What every parser of foreign bytes must keep to, and how long it is tried."""

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hypothesis import HealthCheck, settings

LONG_S = float(os.environ.get("RELIABLEPUB_FUZZ_S", "510"))
"""How long each parser is tried in `make soak`: an hour for all of them."""
CPU_S_MAX = 5.0

short = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
_round = settings(short, max_examples=100)  # each begins with other random numbers


@contextmanager
def bounded(bytes_max: int) -> Iterator[None]:
    """No hang, and no memory beyond a bound, whatever is parsed."""
    is_outermost = not tracemalloc.is_tracing()
    if is_outermost:
        tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    begun = time.process_time()
    try:
        yield
    finally:
        took = time.process_time() - begun
        _, peak = tracemalloc.get_traced_memory()
        if is_outermost:
            tracemalloc.stop()
    assert took < CPU_S_MAX, f"{took:.1f} s"
    assert peak - before < bytes_max, f"{peak - before} bytes"


def for_long(tried: Callable[[], None]) -> None:
    """Try a short test again and again, each time with other examples."""
    again = _round(tried)
    until, rounds = time.monotonic() + LONG_S, 0
    while time.monotonic() < until:
        again()
        rounds += 1
    print(f"{rounds * 100:,} examples in {LONG_S:.0f} s")
