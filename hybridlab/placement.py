"""Which part of a logical parameter a rank's tensor is.

A logical parameter is the one of the plain single-device model: its name and shape are the same at every layout. Tensor
parallelism leaves a rank with some of its rows or columns; `Placement` records which, and that record alone serves
initialisation (draw just this part), the gradient norm (count each logical element once), the sums of gradients that
tensor parallelism owes, and checkpoints (write logical tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hybridlab.cuts import Span


@dataclass(frozen=True)
class Placement:
    """How a local parameter lies in its logical one.

    Attributes:
        name: logical name, e.g. "layers.3.attention.qkv.weight".
        logical_shape: the shape in the plain model.
        dim: the dimension that is cut (0 when nothing is: one span then holds all rows).
        spans: what is held along ``dim``, in local order. Rows beyond them are padding and stay zero.
        tied_copy: a second copy of a tied embedding, on the last pipeline stage; never counted, never written.
    """

    name: str
    logical_shape: tuple[int, ...]
    dim: int
    spans: tuple[Span, ...]
    tied_copy: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        shape = list(self.logical_shape)
        shape[self.dim] = sum(span.stop - span.start for span in self.spans)
        return tuple(shape)

    def intervals(self, local_shape: Sequence[int]) -> list[tuple[int, int, Span]]:
        """The spans as ``(begin, end)`` of the flattened local parameter of ``local_shape``, padding left out.

        A parameter cut along columns is one interval: all of it has the same number of copies.
        """
        numel = 1
        for extent in local_shape:
            numel *= extent
        if self.dim != 0:
            return [(0, numel, self.spans[0])]
        row = numel // local_shape[0]
        begin, found = 0, []
        for span in self.spans:
            end = begin + (span.stop - span.start) * row
            found.append((begin, end, span))
            begin = end
        return found


def replicated(name: str, shape: Sequence[int], *, rank: int, copies: int, partial: bool = False) -> Placement:
    """A parameter that every one of ``copies`` tensor-parallel ranks holds whole.

    ``partial``: its gradient is a partial sum on each of them, as under sequence parallelism (norm weights, biases
    added after a reduce-scatter, position tables see only this rank's slice of the sequence).
    """
    span = Span(0, shape[0], copies, counted=rank == 0, partial=partial and copies > 1)
    return Placement(name, tuple(shape), 0, (span,))


def place(parameter: nn.Parameter, placement: Placement) -> None:
    """Attach its placement to a parameter."""
    parameter.placement = placement  # type: ignore[attr-defined]


def placement_of(parameter: torch.Tensor) -> Placement:
    """The placement attached to a parameter."""
    return parameter.placement  # type: ignore[attr-defined]


def as_tied_copy(placement: Placement) -> Placement:
    """The same placement for the copy that the last stage holds of a tied embedding."""
    return replace(placement, tied_copy=True)


@dataclass
class Interval:
    """A stretch ``begin .. end`` of some flat buffer with what it is part of. Used for norms and owed sums."""

    begin: int
    end: int
    span: Span
    placement: Placement = field(repr=False)

    def clip(self, begin: int, end: int) -> Interval | None:
        """The part inside ``begin .. end``, counted from ``begin``; None when there is none."""
        low, high = max(self.begin, begin), min(self.end, end)
        return Interval(low - begin, high - begin, self.span, self.placement) if low < high else None
