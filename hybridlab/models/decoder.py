"""A decoder as a chain of pieces, each callable on its own: embed, the layers, head.

    token ids [b, s] ─embed─▶ [b, s, hidden] ─layers.0─▶ … ─layers.L-1─▶ [b, s, hidden] ─head─▶ logits [b, s, vocab]

A pipeline deals the pieces out to its stages; nothing but one tensor passes from piece to piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridlab.errors import UserError
from hybridlab.models.attention import CORES
from hybridlab.models.gpt2 import GPT2Block, GPT2Embedding
from hybridlab.models.llama import LlamaBlock, LlamaEmbedding
from hybridlab.models.norms import make_norm
from hybridlab.models.rotary import Rotary
from hybridlab.shapes import TRAINABLE_FAMILIES, ModelShape


class Head(nn.Module):
    """[b, s, hidden] to logits [b, s, vocab]: the final norm and the output matrix."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = make_norm(shape)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


class Decoder(nn.Module):
    """The whole model. Names of parameters are those of `hybridlab.shapes.parameters_of`."""

    embed: nn.Module
    head: Head

    def __init__(self, embed: nn.Module, layers: Sequence[nn.Module], head: Head, *, tied: bool) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self.head = head
        if tied:
            self.head.lm_head.weight = self.embed.tokens.weight  # type: ignore[union-attr, assignment]

    def pieces(self) -> list[tuple[str, nn.Module]]:
        """The chain in order, with names: "embed", "layers.0" …, "head"."""
        layers = [(f"layers.{index}", layer) for index, layer in enumerate(self.layers)]
        return [("embed", self.embed), *layers, ("head", self.head)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] to logits [b, s, vocab]."""
        x = tokens
        for _, piece in self.pieces():
            x = piece(x)
        return x


def build_model(shape: ModelShape, *, attention: str = "sdpa", dtype: torch.dtype | None = None) -> Decoder:
    """The plain model of a shape, on the current default device (``with torch.device("meta")``: without memory).

    Its values are torch's own defaults; `hybridlab.models.initialise_model` draws ours.

    Args:
        shape: of a trainable family.
        attention: "sdpa" (fused) or "eager" (written out).
        dtype: of the parameters; torch's default dtype when None.

    Raises:
        UserError: a family that is only counted, or an unknown ``attention``.
    """
    if not shape.trainable:
        raise UserError(
            f"{shape.name} is of the {shape.family} family, which is counted and planned for, but not built.",
            key="--model",
            value=shape.name,
            fix="a model of one of " + ", ".join(TRAINABLE_FAMILIES),
        )
    if attention not in CORES:
        raise UserError(
            f"there is no attention {attention!r}.", key="attention", value=attention, fix="one of " + ", ".join(CORES)
        )
    rotary = Rotary.of(shape)
    gpt2 = shape.family == "gpt2"
    block = GPT2Block if gpt2 else LlamaBlock
    model = Decoder(
        GPT2Embedding(shape) if gpt2 else LlamaEmbedding(shape),
        [block(shape, CORES[attention](shape, rotary)) for _ in range(shape.layers)],
        Head(shape),
        tied=shape.tied,
    )
    return model if dtype is None else model.to(dtype)
