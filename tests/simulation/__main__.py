"""`python -m tests.simulation SEED` shows one schedule; `... FIRST LAST` runs many and counts."""

import sys

from tests.simulation.schedule import Failed, run, run_all

try:
    match [int(argument) for argument in sys.argv[1:]]:
        case [seed]:
            print("\n".join(run(seed).lines()))
        case [first, last]:
            for what, count in sorted(run_all(range(first, last + 1)).items()):
                print(f"{count:9} {what}")
        case _:
            sys.exit(__doc__)
except Failed as failed:
    sys.exit("\n".join([*failed.report.lines(), str(failed).splitlines()[0]]))
