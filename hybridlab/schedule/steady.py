"""The steady state of a schedule: a round of actions that a longer batch only repeats.

1F1B with 64 micro-batches does what it does with 4, and its middle sixty times more. Whoever wants to know what
happens, not when, need not play all of it: a shorter schedule of the same name, with one round marked, tells the whole.
Nothing is assumed of the schedule: both are compared action by action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridlab.errors import UserError
from hybridlab.schedule.actions import Action, Schedule
from hybridlab.schedule.library import is_file, make_schedule

_ROUNDS = 2  # equal ones that the shorter schedule must hold, so that what one leaves behind can be seen in the next.
# What happens once (the first gradients, messages not yet all on their way, the last reductions) stays outside: actions
# worth `warm` rounds before them, one after.


@dataclass(frozen=True)
class Steady:
    """A schedule told by a shorter one.

    Attributes:
        schedule: the shorter one.
        shift: micro-batches by which a round is later than the one before.
        repeats: rounds that the longer schedule has besides.
        round_end: for each rank, the place in the shorter schedule's actions at which they stand.
        round_length: for each rank, actions in a round.
    """

    schedule: Schedule
    shift: int
    repeats: int
    round_end: tuple[int, ...]
    round_length: tuple[int, ...]

    def later(self, rank: int, position: int, micro_batch: int) -> int:
        """The micro-batch that an action of the shorter schedule has in the longer one."""
        return micro_batch + self.shift * self.repeats if position >= self.round_end[rank] else micro_batch


def steady_state(schedule: Schedule, warm: int = 1) -> Steady | None:
    """The shortest schedule that tells ``schedule``; None when none shorter does (such as GPipe's, which holds more the
    more micro-batches there are).

    Args:
        warm: rounds' worth of actions before the ones that must be equal.
    """
    if is_file(schedule.name):
        return None
    for shorter, shift in _candidates(schedule):
        found = _compare(schedule, shorter, shift, warm)
        if found is not None:
            return found
    return None


def _candidates(schedule: Schedule) -> Iterator[tuple[Schedule, int]]:
    shifts = sorted({1, schedule.stages})
    for micro_batches in range(_ROUNDS, schedule.micro_batches):
        for shift in shifts:
            if (schedule.micro_batches - micro_batches) % shift:
                continue
            try:
                shorter = make_schedule(schedule.name, schedule.stages, micro_batches, chunks=schedule.chunks)
            except UserError:  # not legal with so few
                continue
            yield shorter, shift


def _compare(longer: Schedule, shorter: Schedule, shift: int, warm: int) -> Steady | None:
    repeats = (longer.micro_batches - shorter.micro_batches) // shift
    ends, lengths = [], []
    for long, short in zip(longer.ranks, shorter.ranks):
        extra = len(long) - len(short)
        if extra <= 0 or extra % repeats:
            return None
        length = extra // repeats
        end = next((i for i, (a, b) in enumerate(zip(long, short)) if a != b), len(short))
        end = min(end, len(short) - length) - 1  # an action may already prepare the next: it too must be the same
        rounds = [short[end - (n + 1) * length : end - n * length] for n in reversed(range(_ROUNDS))]
        if end < (_ROUNDS + warm) * length or any(_moved(a, shift) != b for a, b in pairwise(rounds)):
            return None
        middle = tuple(a for n in range(repeats) for a in _moved(rounds[-1], shift * (n + 1)))
        if long != (*short[:end], *middle, *_moved(short[end:], shift * repeats)):
            return None
        ends.append(end)
        lengths.append(length)
    return Steady(shorter, shift, repeats, tuple(ends), tuple(lengths))


def _moved(actions: Sequence[Action], by: int) -> tuple[Action, ...]:
    return tuple(Action(a.op, a.micro_batch + by, a.chunk) for a in actions)
