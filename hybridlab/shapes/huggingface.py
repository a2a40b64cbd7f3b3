"""Shapes from Hugging Face's ``config.json``: the Llama, Mistral, Qwen2, GPT-2, GPT-NeoX, OPT, BLOOM and MPT families.

What changes the model and is not supported is refused by name; so is a key that looks like a misspelling of one that
is read. Keys about anything else (token ids, versions, generation, dtypes on disk) say nothing about the shape.
``model_type`` "gpt3-paper" is GPT-3 as its paper describes it: GPT-2's architecture with ``d_head`` given.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from hybridlab.errors import UserError
from hybridlab.shapes.reader import Reader
from hybridlab.shapes.shape import ModelShape, RopeScaling

Config = Mapping[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}

# Features that would make another model of it: key -> (the values that switch it off, what it is).
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_local_experts": ((None, 0, 1), "a mixture of experts"),
    "num_experts": ((None, 0, 1), "a mixture of experts"),
    "n_routed_experts": ((None, 0), "a mixture of experts"),
    "moe_intermediate_size": ((None, 0), "a mixture of experts"),
    "quantization_config": ((None,), "quantised weights, which cannot be trained here"),
    "partial_rotary_factor": ((None, 1.0), "rotary positions on a part of each head"),
    "add_cross_attention": ((None, False), "cross-attention"),
    "is_encoder_decoder": ((None, False), "an encoder"),
    "scale_attn_by_inverse_layer_idx": ((None, False), "attention scores divided by the layer's number"),
    "kv_lora_rank": ((None,), "multi-head latent attention"),
    "vision_config": ((None,), "an image encoder"),
}
_NO_EFFECT_ON = {"gpt_neox": {"partial_rotary_factor"}}  # counted only, and a rotation has no parameters


def shape_of_config(config: Config, *, name: str | None = None) -> ModelShape:
    """The shape that a ``config.json`` describes.

    Args:
        config: the parsed file.
        name: for reports; by default ``_name_or_path`` of the file, else its ``model_type``.

    Raises:
        UserError: an unknown ``model_type``, a missing or malformed size, or an unsupported feature.
    """
    kind = config.get("model_type")
    if kind not in _READERS:
        raise _unknown_kind(kind)
    for key, (off, what) in _UNSUPPORTED.items():
        if key in _NO_EFFECT_ON.get(kind, ()):
            continue
        if config.get(key) not in off:
            raise UserError(
                f"{what}: {key} = {config[key]!r} describes a model that this engine does not build.",
                key=key,
                value=config[key],
            )
    reader = Reader(config, known=("model_type", *_UNSUPPORTED))
    fields = _READERS[kind](reader)
    reader.finish()
    return ModelShape(name=name or config.get("_name_or_path") or kind, **fields)


def _unknown_kind(kind: Any) -> UserError:
    if kind is None:
        return UserError("a model's configuration needs a model_type.", key="model_type", fix=_kinds())
    mixture = isinstance(kind, str) and ("moe" in kind or "mixtral" in kind or kind.startswith("deepseek"))
    close = difflib.get_close_matches(str(kind), _READERS, n=1, cutoff=0.5)
    what = "is a mixture of experts, which is" if mixture else "is"
    return UserError(
        f"{kind!r} {what} not supported.",
        key="model_type",
        value=kind,
        fix=f"did you mean {close[0]!r}?" if close and not mixture else _kinds(),
    )


def _kinds() -> str:
    return "one of " + ", ".join(_READERS)


def _llama(read: Reader) -> dict[str, Any]:
    """Llama, Mistral, Qwen2: they differ in biases and in the sliding window."""
    family = read.config["model_type"]
    hidden, heads = read.size("hidden_size"), read.size("num_attention_heads")
    bias = read.flag("attention_bias", default=family == "qwen2")
    if family == "qwen2":
        read.must_be("attention_bias", True, "Qwen2 has a bias on queries, keys and values")
    elif family == "mistral":
        read.must_be("attention_bias", False, "Mistral has no biases")
    max_positions = read.size("max_position_embeddings", default=32768 if family != "llama" else 2048)
    window = None
    uses_window = read.flag("use_sliding_window", default=family == "mistral")
    if family != "llama" and read.config.get("sliding_window") is not None and uses_window:
        window = read.size("sliding_window")
    if not set(read.config.get("layer_types") or ()) <= {"full_attention"}:
        raise UserError("layers of different kinds are not supported.", key="layer_types", fix="all full_attention")
    theta, scaling = _rotary(read, max_positions)
    return {
        "family": family,
        "layers": read.size("num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": read.size("num_key_value_heads", default=heads),
        "head_dim": _head_dim(read, hidden, heads),
        "ffn": read.size("intermediate_size"),
        "vocab": read.size("vocab_size"),
        "max_positions": max_positions,
        "tied": read.flag("tie_word_embeddings", default=False),
        "gated": True,
        "qkv_bias": bias,
        "out_bias": bias and family == "llama",
        "mlp_bias": read.flag("mlp_bias", default=False),
        "norm_eps": read.number("rms_norm_eps", default=1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": read.choice("hidden_act", default="silu", among={"silu": "silu", "swish": "silu"}),
        "sliding_window": window,
        "dropout_attention": read.number("attention_dropout", default=0.0),
    }


def _head_dim(read: Reader, hidden: int, heads: int) -> int:
    given = read.size("head_dim", "d_head", default=0)
    if not given and hidden % heads:
        raise UserError(
            f"hidden size {hidden} does not divide by {heads} attention heads.", key="num_attention_heads", value=heads
        )
    return given or hidden // heads


def _rotary(read: Reader, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, in the older spelling (``rope_theta``, ``rope_scaling``) or the newer (``rope_parameters``)."""
    newer = read.config.get("rope_parameters") or {}
    older = read.config.get("rope_scaling") or {}
    read.known.update(("rope_parameters", "rope_scaling"))
    for key, block in (("rope_parameters", newer), ("rope_scaling", older)):
        if not isinstance(block, Mapping):
            raise UserError(f"must be an object, not {block!r}.", key=key, value=block)
    theta = Reader(newer, "rope_parameters.").number(
        "rope_theta", default=read.number("rope_theta", "rotary_emb_base", default=10000.0)
    )
    key, block = ("rope_parameters", newer) if newer else ("rope_scaling", older)
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise UserError(
            f"rotary scaling {kind!r} is not supported.",
            key=f"{key}.rope_type",
            value=kind,
            fix="linear, llama3 or none",
        )
    inner = Reader(block, f"{key}.")
    if block.get("factor") is None:
        raise UserError(f"rotary scaling {kind!r} needs a factor.", key=f"{key}.factor")
    return theta, RopeScaling(
        kind,
        inner.number("factor", default=1.0),
        inner.number("low_freq_factor", default=1.0),
        inner.number("high_freq_factor", default=4.0),
        inner.size("original_max_position_embeddings", default=max_positions),
    )


def _gpt(read: Reader) -> dict[str, Any]:
    """What GPT-2, GPT-NeoX, OPT, BLOOM and MPT share: LayerNorm and biases everywhere, as many kv heads as heads."""
    hidden = read.size("n_embd", "n_embed", "hidden_size", "d_model")
    heads = read.size("n_head", "num_attention_heads", "n_heads")
    return {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _head_dim(read, hidden, heads),
        "layers": read.size("n_layer", "num_hidden_layers", "n_layers"),
        "vocab": read.size("vocab_size"),
        "norm": "layernorm",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "norm_eps": read.number("layer_norm_epsilon", "layer_norm_eps", default=1e-5),
    }


def _learned(rows: int, offset: int = 0) -> dict[str, Any]:
    return {"positions": "learned", "max_positions": rows, "position_rows": rows + offset}


def _gpt2(read: Reader) -> dict[str, Any]:
    fields = _gpt(read)
    dropout = 0.1 if read.config["model_type"] == "gpt2" else 0.0
    return {
        **fields,
        **_learned(read.size("n_positions", "n_ctx", default=1024)),
        "family": "gpt2",
        "ffn": read.size("n_inner", default=4 * fields["hidden"]),
        "tied": read.flag("tie_word_embeddings", default=True),
        "activation": read.choice("activation_function", default="gelu_new", among=_ACTIVATIONS),
        "dropout_embedding": read.number("embd_pdrop", default=dropout),
        "dropout_attention": read.number("attn_pdrop", default=dropout),
        "dropout_residual": read.number("resid_pdrop", default=dropout),
    }


def _gpt_neox(read: Reader) -> dict[str, Any]:
    fields = _gpt(read)
    attention_bias = read.flag("attention_bias", default=True)
    return {
        **fields,
        "family": "gpt_neox",
        "qkv_bias": attention_bias,
        "out_bias": attention_bias,
        "ffn": read.size("intermediate_size"),
        "max_positions": read.size("max_position_embeddings", default=2048),
        "positions": "rotary",
        "rope_theta": read.number("rotary_emb_base", "rope_theta", default=10000.0),
        "tied": read.flag("tie_word_embeddings", default=False),
        "activation": read.choice("hidden_act", default="gelu", among=_ACTIVATIONS),
        "dropout_attention": read.number("attention_dropout", default=0.0),
        "dropout_residual": read.number("hidden_dropout", default=0.0),
    }


def _opt(read: Reader) -> dict[str, Any]:
    fields = _gpt(read)
    read.must_be("word_embed_proj_dim", fields["hidden"], "an embedding narrower than the layers")
    read.must_be("do_layer_norm_before", True, "norms after the blocks instead of before")
    read.must_be("enable_bias", True, "linear layers without bias")
    read.must_be("layer_norm_elementwise_affine", True, "norms without weights")
    read.must_be("_remove_final_layer_norm", False, "a model without its final norm")
    return {
        **fields,
        **_learned(read.size("max_position_embeddings", default=2048), read.size("position_offset", default=2)),
        "family": "opt",
        "ffn": read.size("ffn_dim"),
        "tied": read.flag("tie_word_embeddings", default=True),
        "activation": read.choice("activation_function", default="relu", among=_ACTIVATIONS),
        "dropout_attention": read.number("attention_dropout", default=0.0),
        "dropout_residual": read.number("dropout", default=0.1),
    }


def _bloom(read: Reader) -> dict[str, Any]:
    fields = _gpt(read)
    return {
        **fields,
        "family": "bloom",
        "ffn": read.size("n_inner", default=4 * fields["hidden"]),
        "max_positions": read.size("seq_length", default=2048),
        "positions": "alibi",
        "embedding_norm": True,
        "tied": read.flag("tie_word_embeddings", default=True),
        "activation": "gelu_tanh",
        "dropout_attention": read.number("attention_dropout", default=0.0),
        "dropout_residual": read.number("hidden_dropout", default=0.0),
    }


def _mpt(read: Reader) -> dict[str, Any]:
    """MPT with or without biases (its norms follow), with learned positions or ALiBi."""
    fields = _gpt(read)
    attention = Reader(read.config.get("attn_config") or {}, "attn_config.")
    biased = not read.flag("no_bias", default=True)
    learned = read.flag("learned_pos_emb", default=True) and not attention.flag("alibi", default=False)
    attention.must_be("qk_ln", False, "norms on queries and keys")
    attention.must_be("attn_type", "multihead_attention", "key/value heads fewer than heads")
    length = read.size("max_seq_len", default=2048)
    return {
        **fields,
        **(_learned(length) if learned else {"positions": "alibi", "max_positions": length}),
        "family": "mpt",
        "ffn": read.size("expansion_ratio", default=4) * fields["hidden"],
        "norm": "layernorm" if biased else "layernorm_no_bias",
        "qkv_bias": biased,
        "out_bias": biased,
        "mlp_bias": biased,
        "tied": read.flag("tie_word_embeddings", default=True),
        "activation": "gelu",
    }


_READERS: dict[str, Callable[[Reader], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "gpt2": _gpt2,
    "gpt3-paper": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
}
