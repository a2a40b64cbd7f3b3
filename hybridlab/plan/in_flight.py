"""How many micro-batches a pipeline rank holds, at every action of its schedule.

A micro-batch's activations are kept from its F to its B (or I; what the weight gradient still needs, to its W). Under
1F1B stage r of p keeps min(p - r, m) of them: the first stage most, the last one, and never more however large m is.
GPipe keeps all m. Interleaving keeps more, 2(p-1) + (v-1)p + 1 chunks on rank 0, each 1/v as large; zero-bubble
schedules keep micro-batches until their late W.

`held` reads it off any schedule, a learner's own included. `held_quickly` knows it by formula for the search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridlab.schedule import Schedule


@dataclass(frozen=True)
class Held:
    """What a rank holds while one action runs, besides what the action itself works on.

    Attributes:
        op: "F", "B", "I" or "W".
        micro_batch, chunk: of the action.
        kept: for each chunk of the rank, micro-batches between F and B (or I).
        pending: for each chunk, micro-batches between I and W.
    """

    op: str
    micro_batch: int
    chunk: int
    kept: tuple[int, ...]
    pending: tuple[int, ...]

    @property
    def in_flight(self) -> int:
        """Micro-batches of which anything is kept, this action's included, over all chunks."""
        return sum(self.kept) + sum(self.pending) + 1

    def covers(self, other: Held) -> bool:
        """Whether this is the same kind of action, holding at least as much."""
        mine, theirs = (*self.kept, *self.pending), (*other.kept, *other.pending)
        return (self.op, self.chunk) == (other.op, other.chunk) and all(a >= b for a, b in zip(mine, theirs))


def walk(schedule: Schedule, rank: int) -> list[Held]:
    """What a rank holds at each of its actions, in order."""
    kept, pending = [0] * schedule.chunks, [0] * schedule.chunks
    found = []
    for action in schedule.ranks[rank]:
        chunk = action.chunk
        if action.op in ("B", "I"):
            kept[chunk] -= 1
        elif action.op == "W":
            pending[chunk] -= 1
        found.append(Held(action.op, action.micro_batch, chunk, tuple(kept), tuple(pending)))
        if action.op == "F":
            kept[chunk] += 1
        elif action.op == "I":
            pending[chunk] += 1
    return found


def maxima(moments: Iterable[Held]) -> list[Held]:
    """The moments that no other covers; of equals the first."""
    best: list[Held] = []
    for moment in moments:
        if not any(other.covers(moment) for other in best):
            best = [other for other in best if not moment.covers(other)] + [moment]
    return best


def held(schedule: Schedule, rank: int) -> list[Held]:
    """The moments of a rank at which memory can be at its peak."""
    return maxima(walk(schedule, rank))


def held_quickly(name: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> list[Held]:
    """`held` by formula, for "gpipe", "1f1b", "interleaved-1f1b" and, from above, the zero-bubble schedules.

    Raises:
        KeyError: another schedule.
    """
    m = micro_batches
    if name == "interleaved-1f1b" and ranks > 1:
        most = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1, m * chunks)
        return _interleaved(most, ranks, chunks)
    if name == "zb-v" and ranks > 1:
        most = min(2 * ranks, 2 * m)
        counts = (most - most // 2 - 1, most // 2)
        return [Held(op, 0, chunk, counts, (0, 0)) for op in "FB" for chunk in (0, 1)]
    most = {
        "gpipe": m,
        "1f1b": min(ranks - rank, m),
        "zb-h1": min(ranks - rank, m),
        "zb-h2": min(2 * (ranks - rank) - 1, m),
    }[name if ranks > 1 else "1f1b"]
    waiting = {"zb-h1": min(rank, m - most), "zb-h2": min(2 * rank, m - most)}.get(name, 0) if ranks > 1 else 0
    return [Held(op, 0, 0, (most - 1,), (waiting,)) for op in ("F", "B")]


def _interleaved(most: int, ranks: int, chunks: int) -> list[Held]:
    """The first ``most`` forwards come in rounds: ``ranks`` micro-batches of chunk 0, as many of chunk 1, and so on."""
    order = [index // ranks % chunks for index in range(most)]
    counts = [order.count(chunk) for chunk in range(chunks)]

    def without(chunk: int) -> tuple[int, ...]:
        return tuple(n - (c == chunk) for c, n in enumerate(counts))

    none = (0,) * chunks
    last = order[-1]
    found = [Held("F", 0, last, without(last), none)]
    found += [Held("B", 0, chunk, without(chunk), none) for chunk in range(chunks) if counts[chunk]]
    return found
