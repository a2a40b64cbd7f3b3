"""Causal self-attention: one matrix for queries, keys and values, the core attention, one matrix back.

The *core*, from q, k, v to the heads' outputs, has no parameters and is a module of its own: it holds the part of the
activations that grows with the square of the sequence when written out, and selective recomputation wraps just it.
There are two. `FusedCore` is torch's scaled_dot_product_attention (FlashAttention, arXiv:2205.14135, where there is a
kernel for it): no [s, s] matrix is ever stored. `EagerCore` writes the formula out; its attention dropout is the same
at every layout, head by head.

How many heads there are is read from the tensors, so that tensor parallelism may deal the heads out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab.errors import UserError
from hybridlab.models import streams
from hybridlab.models.dropout import Dropout, apply_mask, default_generator_seeded, seeded
from hybridlab.models.rotary import Rotary
from hybridlab.shapes import ModelShape


class SelfAttention(nn.Module):
    """[b, s, hidden] to [b, s, hidden].

    ``qkv`` gives [b, s, (heads + 2 kv_heads) · head_dim] in blocks queries | keys | values. Sequence parallelism makes
    what comes in and goes out shorter than what ``qkv`` gives; the length is therefore read after it.
    """

    def __init__(self, shape: ModelShape, core: CoreAttention) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries = shape.heads * shape.head_dim
        keys_and_values = 2 * shape.kv_heads * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, queries + keys_and_values, bias=shape.qkv_bias)
        self.core = core
        self.out = nn.Linear(queries, shape.hidden, bias=shape.out_bias)
        self.dropout = Dropout(shape.dropout_residual)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        heads = qkv.view(qkv.shape[0], qkv.shape[1], -1, self.head_dim)
        return self.dropout(self.out(self.core(heads)))


class CoreAttention(nn.Module):
    """qkv [b, s, q + 2 kv, d] to [b, s, q · d], for the q query and kv key/value heads that this rank has."""

    def __init__(self, shape: ModelShape, rotary: Rotary | None) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.sliding_window = shape.sliding_window
        self.rotary = rotary
        self.p = shape.dropout_attention
        self.stream_name = ""

    def forward(self, qkv: Tensor) -> Tensor:
        sequence = qkv.shape[1]
        if self.sliding_window is not None and sequence > self.sliding_window:
            raise UserError(
                f"this model attends within a window of {self.sliding_window} tokens, which is not supported; "
                f"a sequence of {sequence} is longer.",
                key="sequence_length",
                value=sequence,
                fix=f"a sequence length of at most {self.sliding_window}",
            )
        queries, keys = self._split(qkv.shape[2])
        qk, v = qkv[:, :, : queries + keys], qkv[:, :, queries + keys :]
        if self.rotary is not None:
            # The copy of v lets the whole of qkv go: a view would keep the unturned q and k alive until backward.
            qk, v = self.rotary(qk), v.contiguous()
        q, k, v = (x.transpose(1, 2) for x in (qk[:, :, :queries], qk[:, :, queries:], v))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)

    def _split(self, units: int) -> tuple[int, int]:
        """Query and key heads among ``units`` = q + 2 kv.

        Dealt to t ranks, these are (heads + 2 kv_heads)/t units; or, with fewer key/value heads than ranks, each rank
        has its share of the query heads and one key/value head, shared with others.
        """
        keys = max(1, units * self.kv_heads // (self.heads + 2 * self.kv_heads))
        return units - 2 * keys, keys

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, q, s, d], k and v [b, kv, s, d] to [b, q, s, d]; position i sees positions 0 .. i."""
        raise NotImplementedError


class FusedCore(CoreAttention):
    """torch's scaled_dot_product_attention.

    With dropout its kernels draw by themselves, from a generator seeded with (seed, step, module, first sample of the
    micro-batch, tensor-parallel rank): recomputation repeats the mask, but another layout has another one. For equal
    masks at every layout use `EagerCore`.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, s, d], k and v [b, kv heads, s, d] to [b, heads, s, d]."""
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.is_cuda and q.dtype == torch.float32:
            # CUDA's fused kernel for fp32 knows no groups; repeating k and v costs less than a stored [s, s].
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        p = self.p if self.training else 0.0
        if p == 0.0 or not streams.active():
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=grouped)
        seed = streams.seed_of(self.stream_name, "all", streams.head_offset(q.shape[1]))
        with default_generator_seeded(q, seed):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=grouped)


class EagerCore(CoreAttention):
    """softmax(q kᵀ / √d) v, written out: [b, heads, s, s] is kept for backward. The softmax is taken in fp32 (fp64)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [b, heads, s, d], k and v [b, kv heads, s, d] to [b, heads, s, d]."""
        if q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        length = scores.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = scores.softmax(-1, dtype=precise).to(q.dtype)
        return self._drop(weights) @ v

    def _drop(self, weights: Tensor) -> Tensor:
        """Dropout of [b, heads, s, s], with a mask per sample and head of the whole model."""
        if not self.training or self.p == 0.0:
            return weights
        if not streams.active():
            return F.dropout(weights, self.p)
        first = streams.head_offset(weights.shape[1])
        keep = torch.empty(weights.shape, dtype=torch.bool, device=weights.device)
        for sample in range(weights.shape[0]):
            for head in range(weights.shape[1]):
                seed = streams.seed_of(self.stream_name, sample, first + head)
                keep[sample, head].bernoulli_(1.0 - self.p, generator=seeded(weights, seed))
        return apply_mask(weights, keep, self.p)


CORES: dict[str, type[CoreAttention]] = {"sdpa": FusedCore, "eager": EagerCore}
