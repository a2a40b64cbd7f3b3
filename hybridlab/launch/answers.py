"""One exchange with the ranks: wait for an answer from each, and turn what goes wrong into one error.

Who fails first is not always who is heard first: when a rank raises, its peers lose their connections and may report
that before it has formatted its traceback. So the verdict waits a moment, and looks for the cause among all errors.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

from hybridlab.errors import UserError
from hybridlab.launch import channel as messages
from hybridlab.launch import shipping
from hybridlab.launch.failure import Failure, RankError, RemoteError, failed, stuck
from hybridlab.launch.output import Printer
from hybridlab.launch.team import Died, Event, Printed, Said, Team, Woken

GATHER = 0.4  # seconds from the first error to the verdict
GATHER_MORE = 1.2  # the same while all that came are consequences of something not heard of yet
GIVE_UP = 0.5  # seconds that an interrupted rank has to come back; after that it is killed, which is cheap

OnReport = Callable[[int, Any], None]


def _interrupted(what: str) -> KeyboardInterrupt:
    error = KeyboardInterrupt(what)
    # IPython shows this in place of a traceback: where the driver was waiting is no news.
    error.__dict__["_render_traceback_"] = lambda: [f"KeyboardInterrupt: {what}"]
    return error


class Answers:
    """Collects one answer of a kind from each rank.

    Args:
        team: the ranks; ended whenever the exchange fails.
        printer: where their output goes.
        awaited: the kind of message that is a rank's answer.
        seconds: of silence (no answer, no report) after which the ranks are stuck.
        during: put into errors: "while starting".
        quiet: the last lines of a rank that died belong into the error, as they were not shown.
        on_report: is given what ranks report on the way.
    """

    def __init__(
        self,
        team: Team,
        printer: Printer,
        awaited: bytes,
        seconds: float,
        *,
        during: str = "",
        quiet: bool = False,
        on_report: OnReport | None = None,
    ) -> None:
        self._team = team
        self._printer = printer
        self._awaited = awaited
        self._seconds = seconds
        self._during = during
        self._quiet = quiet
        self._on_report = on_report
        self._waiting = set(range(team.size))
        self._answers: list[bytearray] = [bytearray()] * team.size
        self._failures: list[Failure] = []
        self._last_sign = time.monotonic()

    def collect(self) -> list[bytearray]:
        """One payload per rank.

        Raises RankError (or the rank's own UserError) when a rank raised, died or gave no answer, and KeyboardInterrupt
        when interrupted; the team is then ended, except that an interrupt leaves ranks that came back to idle.
        """
        try:
            while self._waiting and time.monotonic() < self._until():
                for event in self._team.wait(min(60.0, self._until() - time.monotonic())):
                    self._take(event)
            if self._failures:
                raise self._verdict()
            if self._waiting:
                raise self._too_late()
            self._team.busy = False
            return self._answers
        except KeyboardInterrupt:
            self._stop()
            if self._team.ended:
                raise _interrupted("the ranks have been ended; the next call starts fresh ones") from None
            self._team.busy = False
            raise _interrupted("the ranks are idle again and keep their variables") from None
        except BaseException:
            self._team.end()
            raise

    def _until(self) -> float:
        """When to stop waiting: at the deadline, or a moment after the first failure."""
        deadline = self._last_sign + self._seconds
        if not self._failures:
            return deadline
        only_consequences = all(failure.consequence for failure in self._failures)
        return min(failure.heard for failure in self._failures) + (GATHER_MORE if only_consequences else GATHER)

    def _take(self, event: Event) -> None:
        match event:
            case Printed(rank, data):
                self._printer.feed(rank, data)
            case Said(rank, kind, payload) if kind == messages.REPORT:
                self._last_sign = time.monotonic()
                if self._on_report is not None:
                    self._on_report(rank, shipping.loads(payload))
            case Said(rank, kind, payload) if kind == self._awaited:
                self._answers[rank] = payload
                self._waiting.discard(rank)
            case Said(rank, _, payload):
                error: RemoteError = pickle.loads(payload)
                self._fail(Failure(rank, error.when, time.monotonic(), error))
            case Died(rank, code):
                crash = self._team.last_stack(rank)
                words = [f"  {line}" for line in self._printer.last[rank]] if self._quiet else []
                if crash is not None and crash.where is not None:
                    words.append(f"  it was {crash}")
                now = time.monotonic()
                self._fail(Failure(rank, now, now, exit_code=code, last_words="\n".join(words)))
            case Woken():
                raise KeyboardInterrupt

    def _fail(self, failure: Failure) -> None:
        self._waiting.discard(failure.rank)
        if all(other.rank != failure.rank for other in self._failures):
            self._failures.append(failure)

    def _verdict(self) -> RankError | UserError:
        others = {rank: str(doing) for rank, doing in self._team.doing(sorted(self._waiting)).items()}
        self._last_output()
        return failed(self._failures, others, self._team.coords, self._during)

    def _too_late(self) -> RankError:
        waiting = self._team.doing(sorted(self._waiting))
        self._last_output()
        finished = [rank for rank in range(self._team.size) if rank not in waiting]
        return stuck(waiting, finished, self._seconds, self._team.coords, self._during)

    def _last_output(self) -> None:
        for event in self._team.wait(0.0):
            if isinstance(event, Printed):
                self._printer.feed(event.rank, event.data)

    def _stop(self) -> None:
        """Interrupt the ranks. Those in Python come back at once; one that waits in gloo cannot, and all are ended."""
        try:
            untaken = any(not self._team.sent(rank) for rank in self._waiting)
            if self._failures or untaken or self._awaited != messages.RESULT:
                return self._team.end()
            self._team.interrupt(self._waiting)
            until = time.monotonic() + GIVE_UP
            while self._waiting and time.monotonic() < until:
                for event in self._team.wait(until - time.monotonic()):
                    if isinstance(event, Printed):
                        self._printer.feed(event.rank, event.data)
                    elif isinstance(event, Said) and event.kind != messages.REPORT:
                        self._waiting.discard(event.rank)
                    elif isinstance(event, Died):
                        return self._team.end()
            if self._waiting:
                self._team.end()
        except BaseException:  # a second interrupt
            self._team.end()
            raise
        return None
