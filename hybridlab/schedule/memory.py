"""What a rank holds in flight: activations that a forward left for a backward to come."""

from __future__ import annotations

from dataclasses import dataclass

from hybridlab.schedule.actions import Schedule

# What an op adds to (forwards kept whole, forwards of which only what W needs is kept).
_CHANGE = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}


@dataclass(frozen=True)
class InFlight:
    """Counts of (micro-batch, chunk), for each rank after each of its actions.

    A forward's activations are all kept until its B or I. I frees a part of them; what the weight gradients are
    computed from (inputs of the linear layers, gradients of their outputs) stays until W.

    Attributes:
        whole: neither B nor I has run.
        deferred: I has run and W has not.
    """

    whole: tuple[tuple[int, ...], ...]
    deferred: tuple[tuple[int, ...], ...]

    @property
    def alive(self) -> tuple[tuple[int, ...], ...]:
        """Both: an activation counts until B or W, as in the Zero-Bubble paper (arXiv:2401.10241, §2.3)."""
        return tuple(tuple(a + b for a, b in zip(*both)) for both in zip(self.whole, self.deferred))

    @property
    def max(self) -> tuple[int, ...]:
        """The most that each rank keeps alive at once."""
        return tuple(max(counts, default=0) for counts in self.alive)

    @property
    def max_whole(self) -> tuple[int, ...]:
        """The most that each rank keeps whole at once."""
        return tuple(max(counts, default=0) for counts in self.whole)


def in_flight(schedule: Schedule) -> InFlight:
    """Count what each rank keeps, after each action."""
    whole, deferred = [], []
    for actions in schedule.ranks:
        kept = left = 0
        kept_after, left_after = [], []
        for action in actions:
            change = _CHANGE[action.op]
            kept += change[0]
            left += change[1]
            kept_after.append(kept)
            left_after.append(left)
        whole.append(tuple(kept_after))
        deferred.append(tuple(left_after))
    return InFlight(tuple(whole), tuple(deferred))
