"""The GPT-2 architecture: LayerNorm before each block, learned positions, GELU, biases, dropout, tied embedding.

Sources: Radford et al., Language Models are Unsupervised Multitask Learners, 2019, §2.3; GELU, arXiv:1606.08415 (in its
tanh form, as GPT-2 has it).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridlab.errors import UserError
from hybridlab.models.attention import CoreAttention, SelfAttention
from hybridlab.models.dropout import Dropout
from hybridlab.models.norms import make_norm
from hybridlab.shapes import ModelShape


class GPT2Embedding(nn.Module):
    """Token ids [b, s] to hidden states [b, s, hidden]: the token's row plus the position's.

    Both look-ups may return a slice of the sequence (sequence parallelism): they are only ever added.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.max_positions = shape.max_positions
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.position_rows, shape.hidden)
        self.dropout = Dropout(shape.dropout_embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.max_positions:
            raise UserError(
                f"this model has learned positions for {self.max_positions} tokens, a sequence of {length} is longer.",
                key="sequence_length",
                value=length,
                fix=f"a sequence length of at most {self.max_positions}",
            )
        position_ids = torch.arange(length, device=tokens.device)
        return self.dropout(self.tokens(tokens) + self.positions(position_ids))


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation = shape.activation
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.mlp_bias)
        self.dropout = Dropout(shape.dropout_residual)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(_activate(self.up(x), self.activation)))


def _activate(x: Tensor, name: str) -> Tensor:
    if name.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    return F.relu(x) if name == "relu" else F.silu(x)


class GPT2Block(nn.Module):
    """One layer: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, shape: ModelShape, core: CoreAttention) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = SelfAttention(shape, core)
        self.mlp_norm = make_norm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))
