"""What a broker may say of a message."""

from typing import Final

from reliablepub.outcome import Outcome, OutcomeKind

REFUSED: Final = Outcome(OutcomeKind.REFUSED, 404, "NOT_FOUND")
RETURNED: Final = Outcome(OutcomeKind.RETURNED, 312, "NO_ROUTE")
