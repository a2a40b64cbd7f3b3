"""The parallel map as arithmetic: which rank sits at which place of the grid, and who shares a group with whom.

Ranks fill a grid of shape [pp, dp, tp], tensor parallelism fastest: ``rank = pp*(DP*TP) + dp*TP + tp``. Neighbours in
the numbering are neighbours in a node, so the group that talks most (tp) crosses the fewest cables. Megatron-LM
(parallel_state.py), DeepSpeed (runtime/pipe/topology.py), torchtitan and nanotron number ranks in this same order.

No torch: planner, browser and launcher all read the same map. `hybridlab.mesh` turns it into groups that talk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

AXES = ("tp", "dp", "pp")


@dataclass(frozen=True)
class Layout:
    """The degrees of the three strategies. Their product is the number of ranks.

    Attributes:
        dp: replicas that read different data (ZeRO shards among them).
        tp: ranks that share each layer.
        pp: ranks that hold different layers.

    Raises:
        ValueError: a degree that is not a whole number of at least 1.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, not {degree!r}")

    @property
    def world(self) -> int:
        """How many ranks the layout needs."""
        return self.dp * self.tp * self.pp

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """The rank at a place of the grid.

        Raises:
            ValueError: a coordinate outside the grid.
        """
        for axis, place in (("pp", pp), ("dp", dp), ("tp", tp)):
            degree = getattr(self, axis)
            if not 0 <= place < degree:
                raise ValueError(f"{axis}={place} is outside the grid: {self} has {axis} 0..{degree - 1}")
        return (pp * self.dp + dp) * self.tp + tp

    def coords(self, rank: int) -> dict[str, int]:
        """Where a rank sits: ``{"pp": ..., "dp": ..., "tp": ...}``.

        Raises:
            ValueError: a rank outside the world.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world: {self} has ranks 0..{self.world - 1}")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "tp": tp}

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """All groups of each axis, ``{"tp": ((0, 1), (2, 3), ...), "dp": ..., "pp": ...}``, in rank order.

        Every rank is in exactly one group of each axis. Creating groups is a collective: every rank must create all of
        them, in this order, also those it is not in.
        """
        return {
            "tp": tuple(tuple(self.rank(p, d, t) for t in range(self.tp)) for p, d in _grid(self.pp, self.dp)),
            "dp": tuple(tuple(self.rank(p, d, t) for d in range(self.dp)) for p, t in _grid(self.pp, self.tp)),
            "pp": tuple(tuple(self.rank(p, d, t) for p in range(self.pp)) for d, t in _grid(self.dp, self.tp)),
        }

    def __str__(self) -> str:
        return f"dp{self.dp}·tp{self.tp}·pp{self.pp}"


def layouts_of(world: int) -> Iterator[Layout]:
    """Every layout of ``world`` ranks, tp and pp ascending."""
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            yield Layout(dp=world // (tp * pp), tp=tp, pp=pp)


def _grid(slow: int, fast: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in range(slow) for b in range(fast))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
