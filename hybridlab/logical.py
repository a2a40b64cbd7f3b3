"""Logical tensors: the parameters of the plain model, put together from the parts that ranks hold.

Whatever the layout, the logical weights, gradients and optimizer states are those of one device. Used to compare a
layout with one rank; checkpoints of large models never put a whole model together and work part by part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridlab.buckets import Shard
from hybridlab.cuts import Span
from hybridlab.optim import state_of
from hybridlab.placement import Placement, placement_of

What = Literal["master", "weights", "gradient", "exp_avg", "exp_avg_sq", "momentum_buffer"]


@dataclass(frozen=True)
class Part:
    """Elements ``begin .. begin + len(values)`` of one rank's flattened local parameter."""

    placement: Placement
    local_shape: tuple[int, ...]
    tp_rank: int
    begin: int
    values: Tensor


def parts(
    shards: Sequence[Shard], what: What, tp_rank: int, optimizer: torch.optim.Optimizer | None = None
) -> list[Part]:
    """What this rank's shards hold of each parameter, copied to the host."""
    found = []
    for shard in shards:
        flat = _flat(shard, what, optimizer)
        for slot in shard.bucket.slots:
            low, high = max(slot.begin, shard.begin), min(slot.end, shard.end)
            if low < high:
                values = flat[low - shard.begin : high - shard.begin].detach().to("cpu", copy=True)
                shape = tuple(slot.parameter.shape)
                found.append(Part(placement_of(slot.parameter), shape, tp_rank, low - slot.begin, values))
    return found


def _flat(shard: Shard, what: What, optimizer: torch.optim.Optimizer | None) -> Tensor:
    if what == "gradient":
        return shard.collect()
    if what in ("master", "weights"):
        return shard.master if what == "master" else shard.weights
    assert optimizer is not None, f"{what} is held by the optimizer"
    return state_of(optimizer, shard.master)[what]


class Incomplete(AssertionError):
    """Some elements are held by nobody, or two ranks hold different values for the same element."""


def assemble(all_parts: Iterable[Part]) -> dict[str, Tensor]:
    """Logical tensors by name, from the parts of all ranks.

    Raises:
        Incomplete: an element is missing, or copies of it differ in any bit.
    """
    locals_: dict[tuple[str, int, bool], list[Part]] = defaultdict(list)
    for part in all_parts:
        locals_[part.placement.name, part.tp_rank, part.placement.tied_copy].append(part)
    logical: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for (name, _, _), pieces in locals_.items():
        placement, shape = pieces[0].placement, pieces[0].local_shape
        local = torch.zeros(shape, dtype=pieces[0].values.dtype)
        here = torch.zeros(shape, dtype=torch.bool)
        for piece in pieces:
            _put(local.view(-1), here.view(-1), slice(piece.begin, piece.begin + len(piece.values)), piece.values, name)
        if name not in logical:
            logical[name] = torch.zeros(placement.logical_shape, dtype=local.dtype)
            filled[name] = torch.zeros(placement.logical_shape, dtype=torch.bool)
        offset = 0
        for span in placement.spans:
            width = span.stop - span.start
            source = local.narrow(placement.dim, offset, width)
            if not bool(here.narrow(placement.dim, offset, width).all()):
                raise Incomplete(f"{name}: rows {span.start}..{span.stop} are not held whole by any rank group")
            _merge(logical[name], filled[name], placement.dim, span, source, name)
            offset += width
    for name, mask in filled.items():
        if not bool(mask.all()):
            raise Incomplete(f"{name}: {int((~mask).sum())} elements are held by nobody")
    return logical


def _put(flat: Tensor, here: Tensor, where: slice, values: Tensor, name: str) -> None:
    known = here[where]
    if bool(known.any()) and not torch.equal(flat[where][known], values[known]):
        raise Incomplete(f"{name}: data-parallel ranks hold different values")
    flat[where] = values
    here[where] = True


def _merge(logical: Tensor, filled: Tensor, dim: int, span: Span, source: Tensor, name: str) -> None:
    target = logical.narrow(dim, span.start, span.stop - span.start)
    known = filled.narrow(dim, span.start, span.stop - span.start)
    if bool(known.any()) and not torch.equal(target[known], source[known]):
        raise Incomplete(f"{name}: two ranks hold different values for the same elements")
    target.copy_(source)
    known.fill_(True)
