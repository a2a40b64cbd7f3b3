"""The Llama architecture: RMSNorm before each block, rotary positions, grouped-query attention, SwiGLU, no biases.

Qwen2 (a bias on queries, keys and values) and Mistral (within its window) are the same code. Sources: Touvron et al.,
arXiv:2302.13971 §2.2 and arXiv:2307.09288; SwiGLU, Shazeer, arXiv:2002.05202.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab.models.attention import CoreAttention, SelfAttention
from hybridlab.models.norms import make_norm
from hybridlab.shapes import ModelShape


class LlamaEmbedding(nn.Module):
    """Token ids [b, s] to hidden states [b, s, hidden]; positions come in later, in the attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)); gate and up are one matrix with rows gate | up."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    """One layer: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, shape: ModelShape, core: CoreAttention) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = SelfAttention(shape, core)
        self.mlp_norm = make_norm(shape)
        self.mlp = SwiGLU(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))
