"""Published models by name, and small ones for a laptop.

Sizes are those of the models' public configuration files or papers; tests hold the totals against published counts.
Bundled tables elsewhere have been wrong (LLaMA with ffn = 4h, BLOOM as 96 layers × 12288, GPT-3 13B with hidden 5140).
"""

from __future__ import annotations

from dataclasses import replace

from hybridlab.shapes.shape import ModelShape, RopeScaling

_ROPE_8 = RopeScaling("llama3", 8.0)
_ROPE_32 = RopeScaling("llama3", 32.0)


def _llama(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int = 32000,
    max_positions: int = 4096,
    *,
    kv_heads: int | None = None,
    family: str = "llama",
    tied: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: RopeScaling | None = None,
    norm_eps: float = 1e-5,
    sliding_window: int | None = None,
) -> ModelShape:
    """RMSNorm, rotary positions, SwiGLU, no biases (Qwen2: on queries, keys and values)."""
    return ModelShape(
        name=name,
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        max_positions=max_positions,
        tied=tied,
        gated=True,
        qkv_bias=family == "qwen2",
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        sliding_window=sliding_window,
    )


def _qwen(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, max_positions: int = 131072
) -> ModelShape:
    """Qwen2.5 base models. Up to 3B they are tied; from 7B on they are not and the table has 128 rows more."""
    tied = hidden < 3584
    return _llama(
        name,
        layers,
        hidden,
        heads,
        ffn,
        151936 if tied else 152064,
        max_positions,
        kv_heads=kv_heads,
        family="qwen2",
        tied=tied,
        rope_theta=1e6,
        norm_eps=1e-6 if hidden < 5120 else 1e-5,
    )


def _gpt(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int = 50257,
    max_positions: int = 2048,
    *,
    dropout: float = 0.0,
) -> ModelShape:
    """LayerNorm, learned positions, GELU, biases everywhere, tied: GPT-2, and GPT-3 by its paper."""
    return ModelShape(
        name=name,
        family="gpt2",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=vocab,
        max_positions=max_positions,
        tied=True,
        norm="layernorm",
        positions="learned",
        position_rows=max_positions,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        dropout_embedding=dropout,
        dropout_attention=dropout,
        dropout_residual=dropout,
    )


def _neox(name: str, layers: int, hidden: int, heads: int, vocab: int) -> ModelShape:
    """Pythia and GPT-NeoX-20B: as GPT, but rotary positions and untied."""
    gpt = _gpt(name, layers, hidden, heads, vocab)
    return replace(gpt, family="gpt_neox", tied=False, positions="rotary", position_rows=0, activation="gelu")


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """OPT: as GPT with ReLU; its table of positions has two rows more than positions."""
    gpt = _gpt(name, layers, hidden, heads, vocab=50272, dropout=0.1)
    return replace(
        gpt, family="opt", position_rows=2050, activation="relu", dropout_embedding=0.0, dropout_attention=0.0
    )


def _bloom(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """BLOOM: as GPT with ALiBi instead of positions and a norm after the embedding."""
    gpt = _gpt(name, layers, hidden, heads, vocab=250880)
    return replace(gpt, family="bloom", positions="alibi", position_rows=0, embedding_norm=True)


_TINY_LLAMA = _llama("tiny-llama", 4, 64, 4, 172, vocab=256, max_positions=512, kv_heads=2)
_TINY_GPT2 = _gpt("tiny-gpt2", 4, 64, 4, vocab=256, max_positions=512)

_SMALL = [
    _TINY_LLAMA,
    replace(_TINY_LLAMA, name="tiny-llama-tied", tied=True),
    replace(_TINY_LLAMA, name="tiny-qwen2", family="qwen2", qkv_bias=True),
    _TINY_GPT2,
    replace(_TINY_GPT2, name="tiny-gpt2-dropout", dropout_embedding=0.1, dropout_attention=0.1, dropout_residual=0.1),
    # A 13B model's proportions (SwiGLU of 2.7 widths, untied, no shared key/value heads) with 8 layers of its 40,
    # narrow enough for 8 ranks on a laptop; tokens are bytes.
    _llama("llama-13b-mini", 8, 64, 4, 172, vocab=256, max_positions=128),
]

_PUBLISHED = [
    _llama("llama-7b", 32, 4096, 32, 11008, max_positions=2048, norm_eps=1e-6),
    _llama("llama-13b", 40, 5120, 40, 13824, max_positions=2048, norm_eps=1e-6),
    _llama("llama-30b", 60, 6656, 52, 17920, max_positions=2048, norm_eps=1e-6),
    _llama("llama-65b", 80, 8192, 64, 22016, max_positions=2048),
    _llama("llama-2-7b", 32, 4096, 32, 11008),
    _llama("llama-2-13b", 40, 5120, 40, 13824),
    _llama("llama-2-70b", 80, 8192, 64, 28672, kv_heads=8),
    _llama("llama-3-8b", 32, 4096, 32, 14336, 128256, 8192, kv_heads=8, rope_theta=5e5),
    _llama("llama-3-70b", 80, 8192, 64, 28672, 128256, 8192, kv_heads=8, rope_theta=5e5),
    _llama("llama-3.1-8b", 32, 4096, 32, 14336, 128256, 131072, kv_heads=8, rope_theta=5e5, rope_scaling=_ROPE_8),
    _llama("llama-3.1-70b", 80, 8192, 64, 28672, 128256, 131072, kv_heads=8, rope_theta=5e5, rope_scaling=_ROPE_8),
    _llama("llama-3.1-405b", 126, 16384, 128, 53248, 128256, 131072, kv_heads=8, rope_theta=5e5, rope_scaling=_ROPE_8),
    _llama(
        "llama-3.2-1b",
        16,
        2048,
        32,
        8192,
        128256,
        131072,
        kv_heads=8,
        tied=True,
        rope_theta=5e5,
        rope_scaling=_ROPE_32,
    ),
    _llama(
        "llama-3.2-3b",
        28,
        3072,
        24,
        8192,
        128256,
        131072,
        kv_heads=8,
        tied=True,
        rope_theta=5e5,
        rope_scaling=_ROPE_32,
    ),
    _llama("mistral-7b", 32, 4096, 32, 14336, 32000, 32768, kv_heads=8, family="mistral", sliding_window=4096),
    _qwen("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 32768),
    _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960),
    _qwen("qwen2.5-3b", 36, 2048, 16, 2, 11008, 32768),
    _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18944),
    _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13824),
    _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27648),
    _qwen("qwen2.5-72b", 80, 8192, 64, 8, 29568),
    _gpt("gpt2", 12, 768, 12, max_positions=1024, dropout=0.1),
    _gpt("gpt2-medium", 24, 1024, 16, max_positions=1024, dropout=0.1),
    _gpt("gpt2-large", 36, 1280, 20, max_positions=1024, dropout=0.1),
    _gpt("gpt2-xl", 48, 1600, 25, max_positions=1024, dropout=0.1),
    _gpt("gpt3-6.7b", 32, 4096, 32),
    _gpt("gpt3-13b", 40, 5120, 40),  # the paper's table prints 5140, which is not 40 heads × 128
    _gpt("gpt3-175b", 96, 12288, 96),
    _gpt("megatron-22b", 48, 6144, 64, vocab=51200),
    _gpt("megatron-175b", 96, 12288, 96, vocab=51200),
    _gpt("megatron-530b", 105, 20480, 128, vocab=51200),
    _gpt("megatron-1t", 128, 25600, 160, vocab=51200),
    _neox("pythia-1.4b", 24, 2048, 16, vocab=50304),
    _neox("pythia-6.9b", 32, 4096, 32, vocab=50432),
    _neox("pythia-12b", 36, 5120, 40, vocab=50688),
    _neox("gpt-neox-20b", 44, 6144, 64, vocab=50432),
    _opt("opt-125m", 12, 768, 12),
    _opt("opt-1.3b", 24, 2048, 32),
    _opt("opt-6.7b", 32, 4096, 32),
    _opt("opt-13b", 40, 5120, 40),
    _bloom("bloom-7b1", 30, 4096, 32),
    _bloom("bloom-176b", 70, 14336, 112),
]

PRESETS: dict[str, ModelShape] = {shape.name: shape for shape in [*_SMALL, *_PUBLISHED]}
