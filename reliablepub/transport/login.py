"""Credentials of a connection: `Login` asks for them, `Tenure` renews them on the open connection.

Knows: the provider, the thread on which it is called, pika's loop, on which answers are passed on,
and ``connection.update-secret``. Must never know: channels, messages, or how connections are
opened.

Nothing here blocks the relay's thread, so commits go on whatever the provider does.

A provider may hang (a token endpoint that accepts a connection and says nothing) or raise. A
question that is not answered within `PATIENCE_S` has failed. The provider is called once at a time:
while a call hangs, the next question waits for its answer. So the answer of a provider that takes
longer than `PATIENCE_S` is used at the next attempt to connect.

The thread lives as long as the transport, because Python 3.12 starts none while the interpreter
shuts down, which is when open messages get their last chance.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias

from pika.adapters.select_connection import IOLoop
from tenacity import wait_random_exponential

from reliablepub.credentials import Credentials, CredentialsProvider
from reliablepub.errors import ReliablePubError
from reliablepub.policy import wait_s

LOGGER: Final = logging.getLogger("reliablepub.link")
PATIENCE_S: Final = 10.0
"""Seconds that an attempt to connect waits for the provider; as long as for TCP."""
STALE_S: Final = 30.0
"""Age in seconds, from the question, above which an answer that no login waited for is not used:
the provider is asked again."""
_RENEW_AFTER: Final = 2 / 3
_RENEW_MIN_S: Final = 0.5
"""A provider that always returns a token about to expire is asked twice a second at most."""
_WAITS: Final = wait_random_exponential(multiplier=0.1, max=15)
"""Between failed renewals: the waits between failed connections."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider said, and when it was asked."""

    credentials: Credentials | None  # None if it failed
    problem: str  # why it failed, without secrets; empty if it did not
    asked_at: float  # monotonic; the lifetime counts from then on

    @property
    def expires_at(self) -> float | None:
        """When the credentials end (monotonic); None if they do not."""
        if self.credentials is None or self.credentials.lifetime_s is None:
            return None
        return self.asked_at + self.credentials.lifetime_s


Told: TypeAlias = Callable[[Answer], None]


class Login:
    """Asks a provider on a thread, and tells its answer on pika's loop.

    All methods must be called on the relay's thread.
    """

    def __init__(
        self, provider: CredentialsProvider, loop: IOLoop, wake: Callable[[], None]
    ) -> None:
        self._provider = provider
        self._loop = loop
        self._wake = wake  # makes the loop call `look`, from any thread
        self._question: _Question | None = None
        self._told: Told | None = None
        self._timer: Any = None
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._begin()

    def close(self) -> None:
        """End the thread, as soon as the provider has returned."""
        self.cancel()
        self._questions.put(None)

    def ask(self, told: Told) -> None:
        """Ask the provider; `told` is called once with its answer. An earlier `told` is dropped."""
        self.cancel()
        self._told = told
        self._timer = self._loop.call_later(PATIENCE_S, self._out_of_patience)
        if self._question is None or self._question.is_stale:
            self._question = _Question(time.monotonic())
            problem = self._begin()
            if problem:
                self._question.answer = Answer(None, problem, self._question.asked_at)
            else:
                self._questions.put(self._question)
        self.look()

    def keep(self, answer: Answer) -> None:
        """Keep an answer for the next `ask`, which follows soon."""
        self._question = _Question(answer.asked_at, answer)

    def cancel(self) -> None:
        """Drop the callback. An answer that is under way is kept for the next `ask`."""
        self._told = None
        if self._timer is not None:
            self._loop.remove_timeout(self._timer)
            self._timer = None

    def look(self) -> None:
        """Tell the answer, if there is one and a login waits for it."""
        if self._question is None or self._question.answer is None or self._told is None:
            return
        answer, self._question = self._question.answer, None
        self._tell(answer)

    def _out_of_patience(self) -> None:
        self._timer = None
        problem = f"the credentials provider has not returned within {PATIENCE_S:g} s"
        self._tell(Answer(None, problem, time.monotonic()))

    def _tell(self, answer: Answer) -> None:
        told = self._told
        self.cancel()
        assert told is not None
        told(answer)

    def _begin(self) -> str:
        """Start the thread, unless it runs; return why it cannot be started, or an empty text."""
        if self._thread is None:
            thread = threading.Thread(
                target=self._main, name="reliablepub-credentials", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # too many threads, or the interpreter is shutting down
                return f"the credentials provider has no thread: {error}"
            self._thread = thread
        return ""

    # ------------------------------------------------------------------ on the thread

    def _main(self) -> None:
        while (question := self._questions.get()) is not None:
            question.answer = self._answer(question.asked_at)
            self._wake()

    def _answer(self, asked_at: float) -> Answer:
        answer = Answer(None, "", asked_at)
        try:
            found: object = self._provider()
            if isinstance(found, Credentials):
                answer = replace(answer, credentials=found)
            else:
                problem = f"the credentials provider returned {type(found).__name__}"
                answer = replace(answer, problem=f"{problem}, not Credentials")
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is told as a reason
            answer = replace(answer, problem=_words(error))
        return answer


@dataclass(slots=True)
class _Question:
    """One call of the provider."""

    asked_at: float  # monotonic
    answer: Answer | None = None  # set once, on the provider's thread; at once if there is none

    @property
    def is_stale(self) -> bool:
        """Whether its answer came, and is too old to use."""
        return self.answer is not None and time.monotonic() - self.asked_at > STALE_S


class Renewable(Protocol):
    """The part of pika's connection that takes a new secret."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""

    def update_secret(
        self, new_secret: str, reason: str, callback: Callable[[Any], Any] | None = None
    ) -> None:
        """Send ``connection.update-secret``; the callback gets ``update-secret-ok``."""


class Tenure:
    """Keeps the credentials of one connection valid: renews them in time, or ends the connection.

    After `_RENEW_AFTER` of the lifetime the provider is asked again, and the broker gets the new
    secret by ``connection.update-secret``. While the provider fails, it is asked again with growing
    waits until the lifetime ends; then the connection is dropped: before 4.3, RabbitMQ would
    refuse the next publishes and blame a message; since 4.3, it closes the connection itself. It is
    dropped too if the provider names another user, since ``connection.update-secret`` cannot change
    the user.

    All methods must be called on the relay's thread.
    """

    def __init__(self, login: Login, loop: IOLoop, answer: Answer) -> None:
        self._login = login
        self._loop = loop
        self._answer = answer
        self._failures = 0
        self._problem = ""
        self._is_updating = False
        self._renewal: Any = None  # timers of pika's loop, or None
        self._end: Any = None

    def begin(
        self,
        connection: Renewable,
        is_current: Callable[[], bool],  # whether the transport still uses the connection
        drop: Callable[[str], None],
    ) -> None:
        """Start to renew the credentials of the connection, which is open now."""
        self._connection = connection
        self._is_current = is_current
        self._drop = drop
        self._plan()
        self._watch_end()

    def end(self) -> None:
        """Stop: the connection is gone. Timers would keep it in memory until the lifetime ends."""
        for timer in (self._renewal, self._end):
            if timer is not None:
                self._loop.remove_timeout(timer)

    def _plan(self) -> None:
        """Set the timer for the next renewal."""
        ends_at = self._answer.expires_at
        if ends_at is not None:
            left_s = max(0.0, ends_at - time.monotonic())
            wait = max(_RENEW_AFTER * left_s, _RENEW_MIN_S)
            self._renewal = self._loop.call_later(wait, self._renew)

    def _watch_end(self) -> None:
        """Drop the connection if its credentials have ended; look again when they will."""
        ends_at = self._answer.expires_at
        if ends_at is None or not self._is_current():
            return
        left_s = ends_at - time.monotonic()
        if left_s > 0:
            self._end = self._loop.call_later(left_s, self._watch_end)
        elif not self._is_updating:  # else the broker reads the new secret before later publishes
            self._drop(f"the credentials have expired; {self._problem or 'there are no new ones'}")

    def _renew(self) -> None:
        if self._is_current():
            self._login.ask(self._on_answer)

    def _on_answer(self, answer: Answer) -> None:
        if not (self._is_current() and self._connection.is_open):
            return
        found = answer.credentials
        if found is None:
            self._problem = answer.problem
            self._failures += 1
            LOGGER.warning(
                "the credentials could not be renewed: %s",
                answer.problem,
                extra={"event": "not_renewed", "reason": answer.problem},
            )
            self._renewal = self._loop.call_later(wait_s(_WAITS, self._failures), self._renew)
            return
        self._failures, self._problem = 0, ""
        assert self._answer.credentials is not None
        if found.user != self._answer.credentials.user:
            self._login.keep(answer)
            self._drop("the credentials provider now names another user")
            return
        if found.secret == self._answer.credentials.secret:
            self._renewed(answer)
            return
        self._is_updating = True
        told = partial(self._on_updated, answer)
        self._connection.update_secret(found.secret, "the old one expires soon", told)

    def _on_updated(self, answer: Answer, _frame: object) -> None:
        """The broker has taken the new secret."""
        self._is_updating = False
        LOGGER.debug("the broker has taken new credentials")
        self._renewed(answer)

    def _renewed(self, answer: Answer) -> None:
        had_ended = (ends_at := self._answer.expires_at) is None or ends_at <= time.monotonic()
        self._answer = answer
        self._plan()
        if had_ended:
            self._watch_end()


def _words(error: BaseException) -> str:
    """An exception of the provider in words that hold no secret.

    The text of an HTTP library's error may quote a request with its secret. Texts of reliablepub's
    own errors are meant for logs; of an `OSError` the operating system's words are taken.
    """
    if isinstance(error, ReliablePubError):
        return str(error)
    words = f"the credentials provider raised {type(error).__name__}"
    if type(error).__module__ == "builtins" and isinstance(error, OSError) and error.strerror:
        return f"{words}: {error.strerror}"
    return words
