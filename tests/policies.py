"""Policies that try once."""

from typing import Final

from tenacity import stop_after_attempt, wait_none

from reliablepub import Retries, RetryPolicy

ONCE: Final = Retries(stop_after_attempt(1), wait_none())
AT_ONCE: Final = RetryPolicy(nacked=ONCE, returned=ONCE, refused=ONCE, breaker=None)
"""Gives a message up at its first refusal, which no other message has to show to be its own."""
