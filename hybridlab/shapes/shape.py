"""The sizes of a decoder-only transformer, its parameters by name, and the rules that sizes must keep.

A decoder is a chain of pieces: ``embed``, ``layers.0`` … ``layers.L-1``, ``head``. Query, key and value are one matrix
``attention.qkv`` whose rows are [queries | keys | values]; a gated feed-forward block's two inner matrices are one,
``mlp.gate_up``, with rows [gate | up]. `parameters_of` is the one list that planner, engine and checkpoints agree on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hybridlab.errors import UserError, UserErrors

TRAINABLE_FAMILIES = ("llama", "mistral", "qwen2", "gpt2")
"""What the engine trains. The other families are counted and planned for."""
COUNTED_FAMILIES = ("gpt_neox", "opt", "bloom", "mpt")
FAMILIES = TRAINABLE_FAMILIES + COUNTED_FAMILIES

NORMS = ("rmsnorm", "layernorm", "layernorm_no_bias")
POSITIONS = ("rotary", "learned", "alibi")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for sequences longer than the model first learned.

    Attributes:
        kind: "linear" (every frequency divided by ``factor``) or "llama3" (only those whose wavelength is long
            compared with ``original_max_positions``, with a smooth transition).
        low_freq_factor, high_freq_factor: the wavelengths, in units of ``original_max_positions``, between which
            "llama3" passes from scaled to unscaled: 1/low is the longest that is mixed, 1/high the shortest.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class ModelShape:
    """What a model is, without any layout. Hashable; two shapes with equal fields are the same model.

    Attributes:
        name: what it is called in reports.
        family: one of `FAMILIES`; those in `TRAINABLE_FAMILIES` can be built.
        layers, hidden, heads: L, h, a of the literature.
        kv_heads: key/value heads, fewer than ``heads`` under grouped-query attention (arXiv:2305.13245).
        head_dim: width of one head; ``heads * head_dim`` need not be ``hidden`` in the Llama families.
        ffn: inner width of the feed-forward block (of each of the two inner matrices where it is gated).
        vocab: rows of the embedding, without any padding for tensor parallelism.
        max_positions: the longest sequence the model is meant for.
        tied: the output matrix is the embedding: one parameter.
        gated: the feed-forward block has three matrices (SwiGLU, arXiv:2002.05202), else two.
        norm: one of `NORMS`; "rmsnorm" has a weight, "layernorm" a weight and a bias.
        positions: one of `POSITIONS`; only "learned" has parameters: ``position_rows`` rows (OPT: 2 more than
            ``max_positions``).
        qkv_bias, out_bias, mlp_bias: which linear layers have a bias.
        embedding_norm: a norm right after the embedding (BLOOM).
        norm_eps, rope_theta, rope_scaling, activation: constants of the arithmetic.
        sliding_window: each position attends to the last so many only; None: to all before it.
        dropout_embedding, dropout_attention, dropout_residual: probabilities, used in training only.

    Raises:
        UserErrors: sizes that do not fit together, all of them named.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    tied: bool = False
    gated: bool = False
    norm: str = "rmsnorm"
    positions: str = "rotary"
    position_rows: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    embedding_norm: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    activation: str = "silu"
    sliding_window: int | None = None
    dropout_embedding: float = 0.0
    dropout_attention: float = 0.0
    dropout_residual: float = 0.0

    def __post_init__(self) -> None:
        wrong = list(_problems(self))
        if wrong:
            raise UserErrors(wrong) if len(wrong) > 1 else wrong[0]

    @property
    def trainable(self) -> bool:
        """Whether the engine can build and train it."""
        return self.family in TRAINABLE_FAMILIES

    @property
    def parameters(self) -> int:
        """Parameters of the whole model: a tied matrix once, no padding of the vocabulary, the same at any layout."""
        return sum(math.prod(parameter.shape) for parameter in parameters_of(self))

    def check_sequence(self, sequence_length: int) -> None:
        """Refuse sequences that the model cannot compute, or would compute otherwise than its name promises.

        Rotary positions go on beyond ``max_positions``; a learned table ends.

        Raises:
            UserError: more positions than the learned table has, or a sliding window shorter than the sequence.
        """
        if self.positions == "learned" and sequence_length > self.max_positions:
            raise UserError(
                f"{self.name} has learned positions for {self.max_positions} tokens, "
                f"a sequence of {sequence_length} needs more.",
                key="sequence_length",
                value=sequence_length,
                fix=f"a sequence length of at most {self.max_positions}",
            )
        if self.sliding_window is not None and sequence_length > self.sliding_window:
            raise UserError(
                f"{self.name} attends within a sliding window of {self.sliding_window} tokens, which this engine "
                f"does not do; up to that length it is full attention, a sequence of {sequence_length} is not.",
                key="sequence_length",
                value=sequence_length,
                fix=f"a sequence length of at most {self.sliding_window}",
            )


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the plain model.

    Attributes:
        name: as in the torch model's ``named_parameters()``.
        shape: sizes; matrices are [out, in].
        kind: "embedding", "positions", "norm" (weight of a norm), "weight" (matrix), "output" (matrix whose result is
            added to the residual stream), or "bias" (norms' biases too).
    """

    name: str
    shape: tuple[int, ...]
    kind: str


@lru_cache(maxsize=256)
def parameters_of(shape: ModelShape) -> tuple[ParameterShape, ...]:
    """All parameters, piece by piece in the order of the torch model; a tied output matrix is not listed again."""
    found = list(embed_parameters(shape))
    layer = tuple(layer_parameters(shape))
    for index in range(shape.layers):
        found += [ParameterShape(f"layers.{index}.{p.name}", p.shape, p.kind) for p in layer]
    return (*found, *head_parameters(shape))


def embed_parameters(shape: ModelShape) -> Iterator[ParameterShape]:
    """The first piece: tables of tokens and positions."""
    yield ParameterShape("embed.tokens.weight", (shape.vocab, shape.hidden), "embedding")
    if shape.positions == "learned":
        yield ParameterShape("embed.positions.weight", (shape.position_rows, shape.hidden), "positions")
    if shape.embedding_norm:
        yield from _norm("embed.norm", shape)


def layer_parameters(shape: ModelShape) -> Iterator[ParameterShape]:
    """One layer, by names within it: "attention.qkv.weight" and so on."""
    hidden, queries, values = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield from _norm("attention_norm", shape)
    yield from _linear("attention.qkv", queries + 2 * values, hidden, shape.qkv_bias)
    yield from _linear("attention.out", hidden, queries, shape.out_bias, "output")
    yield from _norm("mlp_norm", shape)
    inner, rows = ("gate_up", 2 * shape.ffn) if shape.gated else ("up", shape.ffn)
    yield from _linear(f"mlp.{inner}", rows, hidden, shape.mlp_bias)
    yield from _linear("mlp.down", hidden, shape.ffn, shape.mlp_bias, "output")


def head_parameters(shape: ModelShape) -> Iterator[ParameterShape]:
    """The last piece: the final norm, and the output matrix unless it is the embedding."""
    yield from _norm("head.norm", shape)
    if not shape.tied:
        yield ParameterShape("head.lm_head.weight", (shape.vocab, shape.hidden), "embedding")


def _norm(name: str, shape: ModelShape) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (shape.hidden,), "norm")
    if shape.norm == "layernorm":
        yield ParameterShape(f"{name}.bias", (shape.hidden,), "bias")


def _linear(name: str, out: int, into: int, bias: bool, kind: str = "weight") -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (out, into), kind)
    if bias:
        yield ParameterShape(f"{name}.bias", (out,), "bias")


def _problems(shape: ModelShape) -> Iterator[UserError]:
    for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_positions"):
        value = getattr(shape, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield UserError(f"{field} must be a whole number of at least 1, not {value!r}.", key=field, value=value)
            return  # the rules below divide by them
    for field, known in (("family", FAMILIES), ("norm", NORMS), ("positions", POSITIONS), ("activation", ACTIVATIONS)):
        value = getattr(shape, field)
        if value not in known:
            yield UserError(f"{value!r} is not known.", key=field, value=value, fix="one of " + ", ".join(known))
    if shape.heads % shape.kv_heads:
        yield UserError(
            f"{shape.heads} query heads cannot share {shape.kv_heads} key/value heads evenly.",
            key="kv_heads",
            value=shape.kv_heads,
            fix="a divisor of " + str(shape.heads),
        )
    if shape.family not in ("llama", "mistral", "qwen2") and shape.heads * shape.head_dim != shape.hidden:
        yield UserError(
            f"hidden size {shape.hidden} is not {shape.heads} heads × {shape.head_dim} = "
            f"{shape.heads * shape.head_dim}.",
            key="hidden",
            value=shape.hidden,
            fix=f"hidden size {shape.heads * shape.head_dim}",
        )
    if shape.positions == "rotary" and shape.head_dim % 2:
        yield UserError(
            f"rotary positions turn pairs of features: head_dim must be even, not {shape.head_dim}.",
            key="head_dim",
            value=shape.head_dim,
        )
    if (shape.position_rows > 0) != (shape.positions == "learned"):
        yield UserError(
            f"{shape.positions} positions with a table of {shape.position_rows} rows: only learned ones have a table.",
            key="position_rows",
            value=shape.position_rows,
        )
    if shape.positions == "learned" and 0 < shape.position_rows < shape.max_positions:
        yield UserError(
            f"a table of {shape.position_rows} positions does not reach {shape.max_positions}.",
            key="position_rows",
            value=shape.position_rows,
        )
    for field in ("dropout_embedding", "dropout_attention", "dropout_residual"):
        if not 0.0 <= getattr(shape, field) < 1.0:
            yield UserError("a dropout is a probability: 0 ≤ p < 1.", key=field, value=getattr(shape, field))
