"""Tensor parallelism: the matrices inside a layer are cut, a model written for one device stays as it is.

A pair of linear layers needs one sum forward and one backward (Megatron-LM, arXiv:1909.08053 §3)::

    x ──column──▶ [·, out/tp] ──(gelu, attention)──▶ [·, in/tp] ──row──▶ partial sums ──all-reduce──▶ y
       copy: identity forward, all-reduce backward            reduce: all-reduce forward, identity backward

With *sequence parallelism* (Korthikanti et al., arXiv:2205.05198 §4.2) what lies between such pairs (norms, dropout,
the residual) holds only its slice of the sequence: the all-reduce becomes a reduce-scatter, and the copy an
all-gather, as many bytes on the wire and 1/tp of the activations. The gathered input is not kept for backward but
gathered again, at the same time as the input's gradient is computed.

In backward the input's gradient is on its way over the network while the weight's gradient is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab import comm
from hybridlab.cuts import (
    Column,
    Cut,
    Positions,
    Row,
    TensorPlan,
    Vocab,
    column_spans,
    cut_of,
    row_spans,
    vocab_spans,
)
from hybridlab.deferred import Deferred, accumulate
from hybridlab.mesh import Group
from hybridlab.placement import Placement, place, replicated


@dataclass(frozen=True)
class TensorParallel:
    """What the cut layers of one rank share.

    Attributes:
        group: the tensor-parallel group; a group of one leaves layers whole and sends nothing.
        sequence_parallel: activations between the cut layers hold s/tp positions.
        deferred: where weight gradients go during an I action.
    """

    group: Group
    sequence_parallel: bool
    deferred: Deferred

    @property
    def slices_sequence(self) -> bool:
        return self.sequence_parallel and self.group.size > 1


class ParallelLinear(nn.Module):
    """A linear layer, whole or cut by columns (output features) or rows (input features).

    Shapes: column: x [b, s, in] (or its slice [b, s/tp, in] under sequence parallelism) to [b, s, out/tp]; row:
    [b, s, in/tp] to [b, s, out] (or [b, s/tp, out]). The bias of a row-cut layer is added once, after the sum.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        kind: Literal["whole", "column", "row"],
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.kind = kind
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "row":
            y = _Linear.apply(x, self.weight, None, self)
            return y if self.bias is None else y + self.bias
        return _Linear.apply(x, self.weight, self.bias, self)

    def extra_repr(self) -> str:
        return f"{self.kind}, in={self.weight.shape[1]}, out={self.weight.shape[0]}, tp={self.tp.group.size}"


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b with its communication; see the module's docstring.

    The weight is read from the layer in backward rather than saved: under ZeRO-3 its memory is given back in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ParallelLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        tp = layer.tp
        if layer.kind == "column" and tp.slices_sequence:
            x = comm.gather_sequence_async(x, tp.group)()
        y = F.linear(x, weight, bias)
        if layer.kind == "row" and tp.group.size > 1:
            y = comm.scatter_sequence_async(y, tp.group)() if tp.sequence_parallel else comm.all_reduce(y, tp.group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        layer: ParallelLinear = ctx.layer
        tp = layer.tp
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if layer.kind == "row" and tp.slices_sequence:
            grad = comm.gather_sequence_async(grad, tp.group)()
        gathered: Callable[[], Tensor] = lambda: x  # noqa: E731
        if layer.kind == "column" and tp.slices_sequence and needs_weight and not tp.deferred.collecting:
            gathered = comm.gather_sequence_async(x, tp.group)

        dx, arrived = None, None
        if needs_x:
            dx = grad @ layer.weight
            if layer.kind == "column" and tp.group.size > 1:
                if tp.sequence_parallel:
                    arrived = comm.scatter_sequence_async(dx, tp.group)
                else:
                    arrived = comm.all_reduce_async(dx, tp.group).wait if dx.is_contiguous() else None
                    if arrived is None:
                        arrived = comm.all_reduce_async(dx.contiguous(), tp.group).wait
        if tp.deferred.collecting:
            if needs_weight or needs_bias:
                tp.deferred.put(lambda: _late_gradients(layer, x, grad, needs_weight, needs_bias))
            dw = db = None
        else:
            dw, db = _weight_gradients(layer, gathered, grad, needs_weight, needs_bias)
        return (arrived() if arrived is not None else dx), dw, db, None


def _weight_gradients(
    layer: ParallelLinear, gathered: Callable[[], Tensor], grad: Tensor, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dW = gradᵀ x [out, in] and db = Σ grad [out], over all positions."""
    with layer.tp.group.ledger.category("gradients"):
        rows = grad.flatten(0, -2)
        dw = rows.t() @ gathered().flatten(0, -2) if needs_weight else None
        db = rows.sum(0) if needs_bias else None
    return dw, db


def _late_gradients(layer: ParallelLinear, x: Tensor, grad: Tensor, needs_weight: bool, needs_bias: bool) -> None:
    """The W action's part: the same gradients, put into ``.grad`` by hand since autograd has moved on."""
    gathered: Callable[[], Tensor] = lambda: x  # noqa: E731
    if layer.kind == "column" and layer.tp.slices_sequence:
        gathered = comm.gather_sequence_async(x, layer.tp.group)
    dw, db = _weight_gradients(layer, gathered, grad, needs_weight, needs_bias)
    if dw is not None:
        accumulate(layer.weight, dw)
    if db is not None and layer.bias is not None:
        accumulate(layer.bias, db)


class VocabParallelEmbedding(nn.Module):
    """An embedding dealt out by vocabulary: token ids [b, s] to [b, s, h], or [b, s/tp, h] under sequence
    parallelism.

    Ids of other ranks' rows look up row 0 and are zeroed, so that the sum over the group is the embedding.
    """

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, first: int, held: int, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.first, self.held = first, held
        self.tp = tp

    def forward(self, tokens: Tensor) -> Tensor:
        group = self.tp.group
        if group.size == 1:
            return F.embedding(tokens, self.weight)
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.held)
        rows = F.embedding((tokens - self.first).masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return comm.scatter_sequence(rows, group) if self.tp.sequence_parallel else comm.reduce_from(rows, group)


class SlicedPositions(nn.Module):
    """A table of positions under sequence parallelism: each rank looks up the positions [s/tp] of its slice."""

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.tp = tp

    def forward(self, positions: Tensor) -> Tensor:
        group = self.tp.group
        return F.embedding(positions.chunk(group.size, dim=-1)[group.rank], self.weight)


def apply(model: nn.Module, plan: TensorPlan, tp: TensorParallel) -> nn.Module:
    """Cut ``model`` in place by ``plan`` and record on every parameter which part of the logical one it is.

    Every ``nn.Linear`` becomes a `ParallelLinear`, cut or whole, so that its weight gradient can be put off. Cut
    parameters keep the device of the old ones: build the model on the meta device and no rank ever holds it whole.
    Values are not carried over.

    Raises:
        ValueError: a head count, feature count or kind of module that the plan's cut does not fit; names the module.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in list(model.named_modules()):
        cut = cut_of(plan, name)
        try:
            new = _cut_module(name, module, cut, tp)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if new is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
    group = tp.group
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "placement"):
            place(
                parameter,
                replicated(name, parameter.shape, rank=group.rank, copies=group.size, partial=tp.sequence_parallel),
            )
    del names
    return model


def _cut_module(name: str, module: nn.Module, cut: Cut | None, tp: TensorParallel) -> nn.Module | None:
    """The module that takes the place of ``module``; None to leave it."""
    size, rank = tp.group.size, tp.group.rank
    if isinstance(module, nn.Linear):
        out_features, in_features = module.weight.shape
        if cut is None or isinstance(cut, Positions):
            weight, bias, kind = module.weight, module.bias, "whole"
        elif isinstance(cut, Row):
            spans = row_spans(in_features, size, rank)
            weight, bias, kind = _part(module.weight, f"{name}.weight", 1, spans), module.bias, "row"
        else:
            if isinstance(cut, Vocab):
                spans, padding = vocab_spans(out_features, size, rank, cut.multiple)
            else:
                spans, padding = column_spans(cut, out_features, size, rank), 0
            weight = _part(module.weight, f"{name}.weight", 0, spans, padding)
            bias = None if module.bias is None else _part(module.bias, f"{name}.bias", 0, spans, padding)
            kind = "column"
        return ParallelLinear(weight, bias, kind, tp)  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding) and isinstance(cut, Vocab):
        spans, padding = vocab_spans(module.num_embeddings, size, rank, cut.multiple)
        weight = _part(module.weight, f"{name}.weight", 0, spans, padding)
        return VocabParallelEmbedding(weight, spans[0].start, spans[0].stop - spans[0].start, tp)
    if isinstance(module, nn.Embedding) and isinstance(cut, Positions) and tp.slices_sequence:
        return SlicedPositions(module.weight, tp)  # type: ignore[arg-type]
    if cut is not None and not isinstance(module, nn.Embedding):
        raise ValueError(f"the plan cuts it by {type(cut).__name__}, but it is a {type(module).__name__}")
    return None


def _part(whole: Tensor, name: str, dim: int, spans: Any, padding: int = 0) -> nn.Parameter:
    """A new, uninitialised parameter of the local shape, with its placement."""
    shape = list(whole.shape)
    shape[dim] = sum(span.stop - span.start for span in spans) + padding
    part = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), requires_grad=whole.requires_grad)
    place(part, Placement(name, tuple(whole.shape), dim, tuple(spans)))
    return part


__all__ = [
    "Column",
    "ParallelLinear",
    "Positions",
    "Row",
    "SlicedPositions",
    "TensorParallel",
    "Vocab",
    "apply",
]
