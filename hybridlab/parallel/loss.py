"""Cross-entropy over a vocabulary that is dealt out over the tensor-parallel group, without ever joining the logits.

Each rank holds logits [b, s, V/tp]. For the log-sum-exp the ranks agree on the maximum (one all-reduce of [b, s]), then
sum three numbers per token in a single all-reduce: Σ exp, the target's logit (from the rank that owns it) and, when
labels are smoothed, Σ logits. Backward needs no communication: softmax − onehot on each rank's own columns.

Source: Megatron-LM, arXiv:1909.08053 §3; label smoothing as torch.nn.functional.cross_entropy defines it, over the
*global* vocabulary (Megatron-LM#737: the local size and the local mean are wrong).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridlab import comm
from hybridlab.mesh import Group

IGNORE = -100


def cross_entropy_sum(
    logits: Tensor, targets: Tensor, group: Group, *, vocab: int, first: int = 0, smoothing: float = 0.0
) -> Tensor:
    """The cross-entropy summed over the tokens whose target is not `IGNORE`: a scalar in float32 (or float64).

    Args:
        logits: [b, s, V/tp], this rank's columns, padding included; may be bfloat16 or float16.
        targets: [b, s] token ids of the whole vocabulary.
        group: the tensor-parallel group.
        vocab: columns that are real, over all ranks; the padding beyond takes no part.
        first: the vocabulary id of this rank's first column.
        smoothing: label smoothing ε in [0, 1).
    """
    return _CrossEntropySum.apply(logits, targets, group, vocab, first, smoothing)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: Group, vocab: int, first: int, smoothing: float
    ) -> Tensor:
        width = logits.shape[-1]
        real = max(0, min(width, vocab - first))
        scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
        if real < width:
            scores[..., real:] = float("-inf")
        top = comm.all_reduce(scores.amax(-1), group, "max")
        scores.sub_(top.unsqueeze(-1))

        counted = targets != IGNORE
        local = targets - first
        owned = counted & (local >= 0) & (local < real)
        column = local.masked_fill(~owned, 0).unsqueeze(-1)
        target = scores.gather(-1, column).squeeze(-1).masked_fill(~owned, 0.0)
        parts = [target]
        if smoothing:
            parts.append(scores[..., :real].sum(-1))
        scores.exp_()
        parts.append(scores.sum(-1))
        sums = comm.all_reduce(torch.stack(parts), group)
        target, total = sums[0], sums[-1]
        log_total = total.log()
        loss = log_total - target
        if smoothing:
            # (1-ε)(lse - z_target) + ε (lse - mean z); the subtracted maximum cancels in both.
            loss = (1 - smoothing) * loss + smoothing * (log_total - sums[1] / vocab)

        scores.div_(total.unsqueeze(-1))
        ctx.save_for_backward(scores, column, owned, counted)
        ctx.real, ctx.vocab, ctx.smoothing, ctx.dtype = real, vocab, smoothing, logits.dtype
        return loss.masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax, column, owned, counted = ctx.saved_tensors
        scale = grad * counted.to(softmax.dtype)
        dlogits = softmax  # written over: the graph is used once
        if ctx.smoothing:
            dlogits[..., : ctx.real] -= ctx.smoothing / ctx.vocab
        dlogits.scatter_add_(-1, column, -(1 - ctx.smoothing) * owned.to(softmax.dtype).unsqueeze(-1))
        dlogits.mul_(scale.unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None, None, None, None
