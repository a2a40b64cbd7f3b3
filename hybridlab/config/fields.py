"""Where in the resolved config each key with an effect is found: no key is accepted that nobody reads.

A test changes every key and sees the named field move.
"""

from __future__ import annotations

_SIZES = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "overlap_comm": "overlap_comm",
    "gradient_policy": "gradient_policy",
    "stage": "stage",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "persistence_threshold",
    "stage3_model_persistence_threshold": "persistence_threshold",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "offload_optimizer.device": "offload_optimizer",
    "offload_optimizer.ratio": "offload_optimizer",
    "offload_optimizer.pin_memory": "pin_memory",
    "offload_param.device": "offload_param",
    "offload_param.pin_memory": "pin_memory",
}
_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
_SCHEDULER = (
    "warmup_min_lr",
    "warmup_max_lr",
    "warmup_num_steps",
    "warmup_type",
    "total_num_steps",
    "warmup_min_ratio",
    "cos_min_ratio",
)
_LOSS_SCALE = {
    "loss_scale": "static",
    "initial_scale_power": "initial_power",
    "loss_scale_window": "window",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_scale",
}

BECOMES: dict[str, str] = {
    "train_batch_size": "train_batch_size",
    "train_micro_batch_size_per_gpu": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "optimizer.type": "optimizer.type",
    "optimizer.params.adam_w_mode": "optimizer.type",
    **{f"optimizer.params.{key}": f"optimizer.{key}" for key in _OPTIMIZER},
    "scheduler.type": "scheduler.type",
    **{f"scheduler.params.{key}": f"scheduler.params.{key}" for key in _SCHEDULER},
    **{f"{name}.enabled": "precision" for name in ("fp16", "bf16", "fp64")},
    **{f"fp16.{key}": f"loss_scale.{field}" for key, field in _LOSS_SCALE.items()},
    **{f"zero_optimization.{key}": f"zero.{field}" for key, field in _SIZES.items()},
    **dict.fromkeys(("tensor_parallel.tp_size", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"), "tp"),
    "tensor_parallel.sequence_parallel": "sequence_parallel",
    "tensor_parallel.vocab_multiple": "vocab_multiple",
    "data_parallel.dp_size": "dp",
    "pipeline_parallel.pp_size": "pp",
    "pipeline_parallel.schedule": "schedule",
    "pipeline_parallel.virtual_stages": "virtual_stages",
    "pipeline_parallel.split": "split",
    "pipeline_parallel.placement": "schedule",
    "pipeline.stages": "pp",
    "pipeline.partition": "split",
    "pipeline.activation_checkpoint_interval": "recompute_interval",
    "activation_checkpointing.policy": "recompute",
    "activation_checkpointing.interval": "recompute_interval",
    "hybridlab.seed": "seed",
    "hybridlab.sequence_length": "sequence_length",
    "hybridlab.label_smoothing": "label_smoothing",
    "hybridlab.attention": "attention",
    "hybridlab.compile": "compile",
}
"""Dotted key -> dotted place in `Resolved.to_json`."""
