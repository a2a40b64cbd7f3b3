"""What is owed to the gradients after backward, and their global norm.

Runs between the last reduction over the data-parallel group and the optimizer, on the shards that this rank's optimizer
updates. Sums over different groups commute, so the sums that tensor parallelism and tied embeddings owe are done here,
on 1/dp of the elements under ZeRO: ranks that differ only in tp hold the same elements of alike parameters, and a tied
embedding has a bucket of its own so that first and last stage do too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hybridlab import comm
from hybridlab.buckets import Shard
from hybridlab.mesh import Group, Mesh
from hybridlab.placement import Interval


def settle(shards: Sequence[Shard], mesh: Mesh) -> None:
    """Pay the sums that are owed, in place: one message per group at most.

    * parameters that every tensor-parallel rank holds but sees only with its slice of the sequence (norms, biases after
      a reduce-scatter, position tables): SUM over tp; averaging them is a silent error;
    * key/value heads held by several ranks, each serving its own query heads: SUM over those ranks;
    * a tied embedding on first and last stage: SUM over the two.
    """
    for copies, group in owed_groups(mesh).items():
        _sum_together([_gradient(s)[begin:end] for s in shards for begin, end in _partial(s.intervals, copies)], group)
    if mesh.embedding.size > 1:
        _sum_together([_gradient(s) for s in shards if s.bucket.tied], mesh.embedding)


def owed_groups(mesh: Mesh) -> dict[int, Group]:
    """The groups within which partial gradients are owed, by their number of copies."""
    groups = {mesh.kv.size: mesh.kv, mesh.tp.size: mesh.tp}
    return {copies: group for copies, group in groups.items() if copies > 1}


def owed_elements(intervals: Sequence[Interval], copies: int) -> int:
    """How many elements of a shard are owed a sum over ``copies`` ranks."""
    return sum(end - begin for begin, end in _partial(intervals, copies))


def _partial(intervals: Sequence[Interval], copies: int) -> Iterator[tuple[int, int]]:
    for part in intervals:
        if part.span.partial and part.span.copies == copies:
            yield part.begin, part.end


def _gradient(shard: Shard) -> Tensor:
    assert shard.gradient is not None
    return shard.gradient


def _sum_together(pieces: list[Tensor], group: Group) -> None:
    """All-reduce several pieces as one message."""
    if not pieces:
        return
    if len(pieces) == 1:
        pieces[0].copy_(comm.all_reduce(pieces[0], group))
        return
    with group.ledger.category("buffers"):
        together = torch.cat(pieces)
    for piece, total in zip(pieces, comm.all_reduce(together, group).split([p.numel() for p in pieces])):
        piece.copy_(total)


def squared_norm(shards: Sequence[Shard], device: torch.device) -> Tensor:
    """Σ g² over the elements this rank counts, in float64: each logical element is counted by exactly one rank of the
    replica (and of the data-parallel group, where the shards are dealt out). Padding and second copies are not.

    Taken from what the optimizer will be given, so an offloaded gradient is counted where it lies.
    """
    pieces = []
    for shard in shards:
        gradient = shard.collect()
        pieces += [gradient[begin:end] for begin, end in _counted(shard)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch._foreach_norm(pieces, 2)
    return torch.stack([n.to(device) for n in norms]).to(torch.float64).square().sum()


def _counted(shard: Shard) -> list[tuple[int, int]]:
    """Counted stretches, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for part in shard.intervals:
        if part.span.counted and not part.placement.tied_copy:
            if joined and joined[-1][1] == part.begin:
                joined[-1] = (joined[-1][0], part.end)
            else:
                joined.append((part.begin, part.end))
    return joined
