"""What a model is: exact sizes against published counts, configuration files read or refused, torch's names."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridlab.errors import UserError, UserErrors
from hybridlab.models import build_model
from hybridlab.shapes import PRESETS, ModelShape, RopeScaling, load_shape, parameters_of

CONFIGS = json.loads((Path(__file__).parent / "data" / "model_configs.json").read_text())
LLAMA = next(row["config"] for row in CONFIGS if row["name"] == "llama-3-8b")
GPT2 = next(row["config"] for row in CONFIGS if row["name"] == "gpt2")

# Totals from model cards and public model-size tables.
PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-1.4b": 1_414_647_808,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,  # a second public total counts norms and biases once per tensor-parallel rank
    "opt-125m": 125_239_296,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
}


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_a_configuration_gives_its_published_size(row: dict[str, Any]) -> None:
    shape = load_shape(row["config"])
    assert shape.parameters == row["parameters"]
    layer = sum(math.prod(p.shape) for p in parameters_of(shape) if p.name.startswith("layers.0."))
    assert layer == row["layer"]
    preset = PRESETS[row["name"].removesuffix("-v0.1")]
    assert replace(shape, name=preset.name) == preset


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_size(name: str) -> None:
    assert PRESETS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("layers", "hidden", "total"), [(32, 4096, 6_658_859_008), (40, 5120, 12_853_954_560), (48, 7168, 29_975_214_080)]
)
def test_mpt_as_benchmarked(layers: int, hidden: int, total: int) -> None:
    """Counts of llm-foundry's benchmarking page: learned positions, biases, tied, vocabulary padded to 50368."""
    config = {"model_type": "mpt", "n_layers": layers, "d_model": hidden, "n_heads": hidden // 128}
    shape = load_shape({**config, "vocab_size": 50368, "max_seq_len": 2048, "no_bias": False})
    assert shape.parameters == total == (12 * hidden + 13) * layers * hidden + (2 + 50368 + 2048) * hidden


def test_mpt_as_released() -> None:
    """MPT-7B itself: ALiBi, no biases, not in norms either."""
    config = {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, "vocab_size": 50432}
    assert load_shape({**config, "attn_config": {"alibi": True}}).parameters == 6_649_286_656


def test_wrong_tables_are_not_reproduced() -> None:
    """LLaMA with ffn = 4h and BLOOM as 96 × 12288 stand in public tables; their totals are not the models'."""
    assert replace(PRESETS["llama-7b"], ffn=4 * 4096).parameters != PUBLISHED["llama-7b"]
    wrong_bloom = replace(PRESETS["bloom-176b"], layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152)
    assert wrong_bloom.parameters != PUBLISHED["bloom-176b"]


def test_gpt3_13b_with_the_papers_hidden_size_is_refused() -> None:
    config = next(row["config"] for row in CONFIGS if row["name"] == "gpt3-13b")
    with pytest.raises(UserError, match=r"5140.*40.*128.*5120"):
        load_shape({**config, "n_embd": 5140})


@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if shape.trainable])
def test_names_and_shapes_are_the_torch_models(name: str) -> None:
    shape = PRESETS[name]
    # Every layer is alike: three of them show what comes first, between and last.
    few = replace(shape, layers=min(shape.layers, 3))
    with torch.device("meta"):
        model = build_model(few)
    real = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    assert real == [(p.name, p.shape) for p in parameters_of(few)]
    assert few.parameters == sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.layers[0].parameters())
    assert shape.parameters - few.parameters == (shape.layers - few.layers) * layer


def test_a_whole_13b_model_on_the_meta_device() -> None:
    shape = PRESETS["llama-2-13b"]
    with torch.device("meta"):
        model = build_model(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == 13_015_864_320
    assert [name for name, _ in model.named_parameters()] == [p.name for p in parameters_of(shape)]


def test_kinds_say_how_a_parameter_begins() -> None:
    kinds = {p.name: p.kind for p in parameters_of(PRESETS["tiny-gpt2"])}
    assert kinds["embed.tokens.weight"] == "embedding"
    assert kinds["embed.positions.weight"] == "positions"
    assert kinds["layers.0.attention_norm.weight"] == "norm"
    assert kinds["layers.0.attention_norm.bias"] == kinds["layers.0.attention.qkv.bias"] == "bias"
    assert kinds["layers.0.attention.out.weight"] == kinds["layers.3.mlp.down.weight"] == "output"
    assert kinds["layers.0.attention.qkv.weight"] == kinds["layers.0.mlp.up.weight"] == "weight"


def test_the_tiny_presets_divide() -> None:
    for name in ("tiny-llama", "tiny-llama-tied", "tiny-gpt2", "tiny-gpt2-dropout", "tiny-qwen2"):
        shape = PRESETS[name]
        assert (shape.layers, shape.heads, shape.vocab, shape.ffn % 4) == (4, 4, 256, 0)
    assert PRESETS["tiny-llama"].kv_heads == 2


def test_shapes_are_values() -> None:
    shape = PRESETS["llama-3.1-8b"]
    assert hash(shape) == hash(replace(shape))
    assert PRESETS["llama-3-8b"] != replace(PRESETS["llama-3-8b"], layers=31)


# -- where a shape comes from ------------------------------------------------------------------------------------------
def test_by_name_in_any_case() -> None:
    assert load_shape("Llama-2-13B") is PRESETS["llama-2-13b"]
    assert load_shape(PRESETS["gpt2"]) is PRESETS["gpt2"]


def test_by_file_and_by_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_shape(folder) == load_shape(str(folder / "config.json")) == replace(load_shape(LLAMA), name="my-llama")
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert load_shape(tmp_path / "other.json").name == "other"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("lama-2-7b", "did you mean llama-2-7b"),
        ("gpt2-xxl", "gpt2-xl"),
        ("zzzz", "one of tiny-llama"),
        ("nowhere/config.json", "there is no file nowhere/config.json"),
        ("missing.json", "there is no file missing.json"),
    ],
)
def test_no_such_model(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_shape(given)


@pytest.mark.parametrize(("text", "told"), [("{", "is not JSON"), ("[1]", "holds a list"), ("\x00\xff", "is not JSON")])
def test_not_a_configuration(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=told):
        load_shape(path)


def test_both_spellings_of_rotary_settings() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    older = load_shape({**LLAMA, "rope_scaling": {"rope_type": "llama3", **llama3}})
    assert (older.rope_theta, older.rope_scaling) == (500000.0, expected)
    newer = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 500000.0, **llama3}
    assert load_shape(newer) == older
    assert load_shape({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling == RopeScaling(
        "linear", 2.0, original_max_positions=8192
    )
    assert load_shape({**LLAMA, "rope_scaling": {"rope_type": "default"}}).rope_scaling is None


def test_biases_of_the_llama_families() -> None:
    llama = load_shape({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias) == (True, True, True)
    qwen = load_shape({**LLAMA, "model_type": "qwen2"})
    assert (qwen.qkv_bias, qwen.out_bias, qwen.mlp_bias) == (True, False, False)


def test_a_head_may_be_wider_than_its_share() -> None:
    shape = load_shape({**LLAMA, "head_dim": 256})
    assert (shape.head_dim, shape.heads * shape.head_dim) == (256, 8192)


def test_foreign_keys_are_no_mistakes() -> None:
    config = {**LLAMA, "bos_token_id": 1, "torch_dtype": "bfloat16", "transformers_version": "4.31", "use_cache": True}
    assert load_shape({**config, "architectures": ["LlamaForCausalLM"], "pretraining_tp": 1}) == load_shape(LLAMA)


@pytest.mark.parametrize(
    ("config", "key", "told"),
    [
        ({"hidden_size": 64}, "model_type", "needs a model_type"),
        ({**LLAMA, "model_type": "lama"}, "model_type", "did you mean 'llama'"),
        ({**LLAMA, "model_type": "mixtral"}, "model_type", "mixture of experts"),
        ({**LLAMA, "model_type": "qwen2_moe"}, "model_type", "mixture of experts"),
        ({**LLAMA, "model_type": 3}, "model_type", "not supported"),
        ({**LLAMA, "num_local_experts": 8}, "num_local_experts", "mixture of experts"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config", "quantised"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor", "part of each head"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type", "yarn"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type", "dynamic"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "needs a factor"),
        ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling", "must be an object"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({**LLAMA, "layer_types": ["sliding_attention"]}, "layer_types", "different kinds"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size", "'4096'"),
        ({**LLAMA, "hidden_size": True}, "hidden_size", "True"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
        ({**LLAMA, "num_hidden_layers": 2.5}, "num_hidden_layers", "2.5"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ({**LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps", "must be a number"),
        ({**LLAMA, "num_key_value_heads": 5}, "kv_heads", "32.*5"),
        ({**LLAMA, "num_attention_heads": 30, "num_key_value_heads": 30}, "num_attention_heads", "4096.*30"),
        ({**LLAMA, "head_dim": 3}, "head_dim", "even"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx", "layer's number"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention", "cross-attention"),
        ({**GPT2, "activation_function": "gegl"}, "activation_function", "gegl"),
        ({**GPT2, "attn_pdrop": 1.0}, "dropout_attention", "probability"),
    ],
)
def test_refused_by_name(config: dict[str, Any], key: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as raised:
        load_shape(config)
    assert raised.value.key == key


def test_a_misspelt_size_is_not_a_default() -> None:
    config = {**LLAMA, "num_key_value_head": 8}
    del config["num_key_value_heads"]
    with pytest.raises(UserError, match="did you mean 'num_key_value_heads'"):
        load_shape(config)
    config = {**LLAMA, "num_hidden_layer": 32}
    del config["num_hidden_layers"]
    with pytest.raises(UserError, match="rename 'num_hidden_layer' to"):
        load_shape(config)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"word_embed_proj_dim": 512}, "narrower"),
        ({"do_layer_norm_before": False}, "after the blocks"),
        ({"enable_bias": False}, "without bias"),
    ],
)
def test_opt_variants_are_refused(change: dict[str, Any], told: str) -> None:
    config = next(row["config"] for row in CONFIGS if row["name"] == "opt-125m")
    with pytest.raises(UserError, match=told):
        load_shape({**config, **change})


def test_a_sliding_window_bounds_the_sequence() -> None:
    mistral = PRESETS["mistral-7b"]
    mistral.check_sequence(4096)
    with pytest.raises(UserError, match=r"window of 4096.*8192"):
        mistral.check_sequence(8192)
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 1024}
    assert load_shape({**qwen, "use_sliding_window": False}).sliding_window is None
    assert load_shape({**qwen, "use_sliding_window": True}).sliding_window == 1024


def test_a_learned_table_bounds_the_sequence_a_rotation_does_not() -> None:
    PRESETS["gpt2"].check_sequence(1024)
    with pytest.raises(UserError, match=r"1024 tokens.*1025"):
        PRESETS["gpt2"].check_sequence(1025)
    PRESETS["llama-2-7b"].check_sequence(100_000)


def test_a_hand_made_shape_is_told_everything_that_is_wrong() -> None:
    with pytest.raises(UserErrors) as raised:
        replace(PRESETS["tiny-llama"], kv_heads=3, norm="batchnorm", dropout_residual=1.5)
    assert {error.key for error in raised.value.errors} == {"kv_heads", "norm", "dropout_residual"}
    with pytest.raises(UserError, match="at least 1"):
        replace(PRESETS["tiny-llama"], heads=0)
    with pytest.raises(UserError, match="only learned ones have a table"):
        replace(PRESETS["tiny-llama"], position_rows=8)


def test_only_some_families_are_trained() -> None:
    trainable = {shape.family for shape in PRESETS.values() if shape.trainable}
    assert trainable == {"llama", "mistral", "qwen2", "gpt2"}
    assert isinstance(PRESETS["bloom-176b"], ModelShape) and not PRESETS["bloom-176b"].trainable
    with pytest.raises(UserError, match="counted and planned for, but not built"):
        build_model(PRESETS["bloom-176b"])
