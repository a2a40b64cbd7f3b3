"""Names: second spellings that mean the same, and what to say of a name that is not a key.

An unknown key is refused at every level. DeepSpeed ignores unknown keys at the top level, so a misspelled one silently
does nothing (DeepSpeed#653, #774, #1809); telling the right name is the cure.
"""

from __future__ import annotations

from difflib import get_close_matches

from hybridlab.config.idle import is_comment
from hybridlab.config.keys import IDLE
from hybridlab.config.schema import sections

SYNONYMS: dict[str, dict[str, str]] = {
    "": {"bfloat16": "bf16"},
    "zero_optimization": {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
    },
    "pipeline": {"partition_method": "partition", "num_stages": "stages"},
}
"""Section path -> other spelling -> the key it stands for. DeepSpeed accepts these itself."""

OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Switches of `zero_optimization` from before 2021 -> the section whose device they set to cpu."""

_MODEL = "the model comes with --model; remove it."
_OTHER_NAMES: dict[str, str] = {
    "batch_size": "train_batch_size",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batches": "gradient_accumulation_steps",
    "num_microbatches": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "clip_grad": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "max_lr": "scheduler.params.warmup_max_lr",
    "min_lr": "scheduler.params.warmup_min_lr",
    "warmup_steps": "scheduler.params.warmup_num_steps",
    "warmup": "scheduler.params.warmup_num_steps",
    "zero_stage": "zero_optimization.stage",
    "cpu_offload_params": "zero_optimization.cpu_offload_param",
    "dp": "data_parallel.dp_size",
    "data_parallel_size": "data_parallel.dp_size",
    "tp": "tensor_parallel.tp_size",
    "tensor_parallel_size": "tensor_parallel.tp_size",
    "tensor_parallel_degree": "tensor_parallel.tp_size",
    "tensor_model_parallel_size": "tensor_parallel.tp_size",
    "model_parallel_size": "tensor_parallel.tp_size",
    "mp_size": "tensor_parallel.tp_size",
    "pp": "pipeline_parallel.pp_size",
    "pipe_parallel_size": "pipeline_parallel.pp_size",
    "pipeline_parallel_size": "pipeline_parallel.pp_size",
    "pipeline_parallel_degree": "pipeline_parallel.pp_size",
    "pipeline_model_parallel_size": "pipeline_parallel.pp_size",
    "num_stages": "pipeline_parallel.pp_size",
    "v": "pipeline_parallel.virtual_stages",
    "chunks": "pipeline_parallel.virtual_stages",
    "num_chunks": "pipeline_parallel.virtual_stages",
    "num_model_chunks": "pipeline_parallel.virtual_stages",
    "interleave": "pipeline_parallel.virtual_stages",
    "virtual_pipeline_size": "pipeline_parallel.virtual_stages",
    "virtual_pipeline_model_parallel_size": "pipeline_parallel.virtual_stages",
    "pipeline_schedule": "pipeline_parallel.schedule",
    "seq_length": "hybridlab.sequence_length",
    "seq_len": "hybridlab.sequence_length",
    "max_seq_length": "hybridlab.sequence_length",
    "block_size": "hybridlab.sequence_length",
    "make_vocab_size_divisible_by": "tensor_parallel.vocab_multiple",
    "recompute": "activation_checkpointing.policy",
    "recompute_granularity": "activation_checkpointing.policy",
    "gradient_checkpointing": "activation_checkpointing.policy",
    "checkpoint_activations": "activation_checkpointing.policy",
    "partitioned_activations": "activation_checkpointing.partition_activations",
}
"""What other systems call it -> where it stands here."""

_REMARKS: dict[str, str] = {
    "opt_level": "it is a key of Apex amp; remove it.",
    "cuda_visible_devices": "the environment variable CUDA_VISIBLE_DEVICES chooses devices; remove it.",
    "num_layers": _MODEL,
    "hidden_size": _MODEL,
    "num_attention_heads": _MODEL,
    "num_key_value_heads": _MODEL,
    "vocab_size": _MODEL,
    "max_position_embeddings": _MODEL,
    "hidden_dropout": _MODEL,
    "attention_dropout": _MODEL,
    "norm": _MODEL,
    "pos_emb": _MODEL,
    "no_weight_tying": _MODEL,
    "dtype": "one of fp16.enabled, bf16.enabled, fp64.enabled; none of them is fp32.",
    "precision": "one of fp16.enabled, bf16.enabled, fp64.enabled; none of them is fp32.",
    "fp32": "fp32 is what runs when fp16, bf16 and fp64 are off; remove it.",
    "train_iters": "the length of a run comes with train --steps; remove it.",
    "max_steps": "the length of a run comes with train --steps; remove it.",
    "steps": "the length of a run comes with train --steps; remove it.",
    "data": "the data comes with train --data; remove it.",
    "model": _MODEL,
    "grad_hooks": "DeepSpeed no longer has it; remove it.",
}


def _known() -> dict[str, list[str]]:
    """Section path -> every name it knows."""
    known = {path: list(model.model_fields) for path, model in sections().items()}
    for path, table in IDLE.items():
        known.setdefault(path, []).extend(table)
    for path, others in SYNONYMS.items():
        known[path].extend(others)
    known["zero_optimization"].extend(OLD_OFFLOAD)
    return known


KNOWN = _known()


def suggest(section: str, key: str) -> str:
    """What to write instead of an unknown ``key`` of ``section``: the fix of its error."""
    folded = key.strip().lower().replace("-", "_")
    here = KNOWN.get(section, [])
    if folded in here:
        return f"{folded}, as written."
    elsewhere = [path for path, names in KNOWN.items() if folded in names and path != section]
    if elsewhere:
        return f"it is a key of {_or([path or 'the top level' for path in elsewhere])}; move it there."
    if folded in _OTHER_NAMES:
        return f"{_OTHER_NAMES[folded]} is its name here."
    if folded in _REMARKS:
        return _REMARKS[folded]
    close = get_close_matches(folded, here, n=1, cutoff=0.75)
    if close:
        return f'did you mean "{close[0]}"?'
    everywhere = {name: path for path, names in KNOWN.items() for name in names}
    close = get_close_matches(folded, everywhere, n=1, cutoff=0.85)
    if close:
        path = everywhere[close[0]]
        return f'did you mean "{path}.{close[0]}"?' if path else f'did you mean "{close[0]}" at the top level?'
    return f'remove it, or call it "_comment".{_listing(section, here)}'


def _listing(section: str, names: list[str]) -> str:
    """The section's own keys when they are few enough to read."""
    shown = [name for name in names if not is_comment(name)]
    return f" {section} has {', '.join(shown)}." if section and len(shown) <= 8 else ""


def _or(values: list[str]) -> str:
    return " or ".join([", ".join(values[:-1]), values[-1]] if len(values) > 1 else values)
