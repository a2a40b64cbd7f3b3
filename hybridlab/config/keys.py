"""Keys that are known and have no effect here: why each has none, and which of its values would have to have one.

The rule that decides: what only logs, tunes speed or cares for something that this engine does not have is accepted and
said to have no effect. What would change the mathematics of training or its promise about memory or traffic is refused,
for dropping it silently would be a lie. Many keys are both: harmless when switched off, refused when switched on.

Sources: DeepSpeed 0.19.8 (runtime/config.py, runtime/zero/config.py, runtime/precision_config.py, ...) and the keys of
older versions that public configs still carry.
"""

from __future__ import annotations

from hybridlab.config.idle import Idle, never, nowhere_enabled, off, only, switched_off

_LOGS = "it only changes what is printed; the ledger keeps times, bytes and messages of every run"
_MONITOR = "it only sends logs elsewhere; `train` writes its own"
_NO_NVME = "it concerns nvme, which is not implemented"
_STAGE3_HOST = "it tunes DeepSpeed's host code at stage 3; the result is the same"
_OWN_CHECKPOINTS = "checkpoints are in torch.distributed.checkpoint's format and load at any layout"
_ONE_NORMALISATION = "gradients are divided once, by the target tokens of the global batch; the order cannot matter"

TOP: dict[str, Idle] = {
    **dict.fromkeys(
        ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers"),
        Idle(_LOGS),
    ),
    **dict.fromkeys(
        (
            "tensorboard",
            "wandb",
            "csv_monitor",
            "comet",
            "monitor_config",
            "comms_logger",
            "comms_config",
            "flops_profiler",
        ),
        Idle(_MONITOR),
    ),
    "autotuning": Idle("DeepSpeed's launcher reads it to search; the values in the file are trained as they stand"),
    "aio": Idle(_NO_NVME),
    "checkpoint": Idle(_OWN_CHECKPOINTS),
    "datastates_ckpt": Idle(_OWN_CHECKPOINTS),
    "nebula": Idle(
        _OWN_CHECKPOINTS, switched_off, "Nebula checkpoints are not implemented.", "remove it, or enabled false."
    ),
    "zero_allow_untested_optimizer": Idle("every optimizer here is tested with ZeRO"),
    "zero_force_ds_cpu_optimizer": Idle("offload runs the same optimizer on the host, whatever this says"),
    "disable_python_gc": Idle("it tunes Python, not training"),
    "disable_allgather": Idle("updated weights are always gathered; the result is the same"),
    "allgather_size": Idle("an old name of the gather bucket, read only with zero_optimization true"),
    "vocabulary_size": Idle("the model says its vocabulary; DeepSpeed only warns about it"),
    "dataloader_drop_last": Idle("every batch is full"),
    "prescale_gradients": Idle(_ONE_NORMALISATION),
    "gradient_predivide_factor": Idle(_ONE_NORMALISATION),
    "fp32_allreduce": Idle("gradients are always reduced in fp32"),
    "gradient_allreduce_op": Idle(
        "gradients are averaged",
        only("mean"),
        "gradients are averaged over the tokens of the global batch, not combined by {}.",
        '"mean", or leave it out.',
    ),
    "communication_data_type": Idle(
        "gradients are always reduced in fp32 (fp64 in fp64)",
        only("fp32"),
        "gradients are reduced in fp32, not in {}.",
        '"fp32", or leave it out.',
    ),
    "seq_parallel_communication_data_type": Idle("it concerns Ulysses sequence parallelism, which is not used"),
    "sequence_parallel_size": Idle(
        "it concerns Ulysses sequence parallelism, which is not used",
        only(1),
        "Ulysses sequence parallelism over {} ranks is not implemented.",
        "tensor_parallel.sequence_parallel true cuts the sequence over the tp ranks.",
    ),
    "managed_gradient_accumulation": Idle(
        "the engine always knows the last micro-batch",
        only(True),
        "the engine itself ends a step after gradient_accumulation_steps micro-batches.",
        "true, or leave it out.",
    ),
    "sparse_gradients": off("gradients of embeddings are dense", "sparse reduction of embedding gradients"),
    "use_data_before_expert_parallelism": Idle("there are no experts"),
    "data_types": Idle("it holds keys without effect", inside=True),
    "torch_autocast": Idle(
        "it is off",
        switched_off,
        "torch_autocast runs chosen operations in lower precision, which is not implemented.",
        "bf16.enabled true, and remove torch_autocast.",
    ),
    "amp": Idle("it is off", switched_off, "Apex amp is not implemented.", "fp16.enabled true, and remove amp."),
    "elasticity": Idle(
        "it is off",
        switched_off,
        "elasticity would change the batch size with the number of ranks.",
        "remove it and state the batch.",
    ),
    "data_efficiency": Idle(
        "it is off", nowhere_enabled, "data_efficiency would change which tokens are trained on.", "remove it."
    ),
    "curriculum_learning": Idle(
        "it is off", switched_off, "curriculum learning would change the sequence length during training.", "remove it."
    ),
    "progressive_layer_drop": Idle(
        "it is off", switched_off, "progressive layer drop would leave out layers at random.", "remove it."
    ),
    "compression_training": Idle(
        "nothing in it is enabled", nowhere_enabled, "compression would quantise or prune the model.", "remove it."
    ),
    "quantize_training": Idle("it is off", switched_off, "quantised training is not implemented.", "remove it."),
    "weight_quantization": Idle("it is empty", only({}), "quantised weights are not implemented.", "remove it."),
    "eigenvalue": Idle("it is off", switched_off, "eigenvalue-steered quantisation is not implemented.", "remove it."),
    "sparse_attention": Idle("", never, "sparse attention would change what each token sees.", "remove it."),
    "hybrid_engine": Idle(
        "it is off", switched_off, "the hybrid engine switches to inference kernels, which are not here.", "remove it."
    ),
    "expert_parallel": Idle("it is off", switched_off, "mixtures of experts are not implemented.", "remove it."),
    "moe": Idle("it is off", switched_off, "mixtures of experts are not implemented.", "remove it."),
    "graph_harvesting": off("it is off", "graph harvesting"),
    "compile": Idle("it is DeepCompile's section; `hybridlab.compile` is torch.compile", inside=True),
}

DATA_TYPES: dict[str, Idle] = {
    "grad_accum_dtype": Idle(
        "gradients are always accumulated in fp32 (fp64 in fp64)",
        only("fp32"),
        "gradients are accumulated in fp32, not in {}.",
        '"fp32", or leave it out.',
    ),
    "param_dtype": Idle("", never, "the precision section decides the dtype of the weights.", "leave it out."),
    "buffer_dtype": Idle("the models' buffers (rotary tables) are computed in fp32 whatever this says"),
    "keep_in_fp32_modules": Idle("the models' buffers (rotary tables) are computed in fp32 whatever this says"),
}
_COMPILES = "DeepCompile is not used; it changes speed, not results"
COMPILE: dict[str, Idle] = {
    **dict.fromkeys(
        (
            "deepcompile",
            "autoep_non_moe",
            "free_activation",
            "free_activation_threshold",
            "offload_activation_pin_memory",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
            "passes",
            "enabled",
            "backend",
            "kwargs",
        ),
        Idle(_COMPILES),
    ),
    "offload_activation": off(_COMPILES, "offload of activations", "activation_checkpointing.policy full."),
    "offload_opt_states": off(
        _COMPILES, "DeepCompile's offload", 'zero_optimization.offload_optimizer {"device": "cpu"}.'
    ),
    "offload_parameters": off(
        _COMPILES, "DeepCompile's offload", 'zero_optimization.offload_param {"device": "cpu"} at stage 3.'
    ),
}

_GATHERS = "saved weights are always whole: checkpoints hold logical tensors"
ZERO: dict[str, Idle] = {
    "contiguous_gradients": Idle("gradients always lie in contiguous buckets"),
    "reduce_scatter": Idle("stages 1 to 3 always reduce-scatter; an all-reduce would give the same gradients"),
    "allgather_partitions": Idle("updated weights are always gathered; broadcasts would give the same weights"),
    "use_multi_rank_bucket_allreduce": Idle("it tunes DeepSpeed's messages; the result is the same"),
    "round_robin_gradients": Idle("it tunes how DeepSpeed's offload deals gradients to ranks; the result is the same"),
    "parameter_alignment": Idle("it pads DeepSpeed's flat buffers; ours are aligned in their own way"),
    "sub_group_size": Idle("it tiles DeepSpeed's optimizer step; the result is the same"),
    "load_from_fp32_weights": Idle(_OWN_CHECKPOINTS),
    "elastic_checkpoint": Idle(_OWN_CHECKPOINTS),
    "pipeline_loading_checkpoint": Idle(_OWN_CHECKPOINTS),
    "gather_16bit_weights_on_model_save": Idle(_GATHERS),
    "stage3_gather_16bit_weights_on_model_save": Idle(_GATHERS),
    "stage3_gather_fp16_weights_on_model_save": Idle(_GATHERS),
    "compute_grad_norm": Idle("the global gradient norm is always computed"),
    "ignore_unused_parameters": Idle("every parameter of the models here is used"),
    "legacy_stage1": Idle("there is one implementation of stage 1"),
    "save_muon_momentum_buffer_in_memory": Idle(_NO_NVME),
    "log_trace_cache_warnings": Idle(_LOGS),
    "enable_sanity_checks": Idle("checks that cost nothing are always on"),
    "leaf_module": Idle("layers are gathered whole at stage 3"),
    **dict.fromkeys(
        (
            "stage3_module_granularity_threshold",
            "module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "allgather_sequential",
            "memory_efficient_linear",
            "override_module_apply",
        ),
        Idle(_STAGE3_HOST),
    ),
    "cpu_offload_use_pin_memory": Idle("an old key; offload_optimizer.pin_memory decides"),
    "zero_hpz_partition_size": Idle(
        "it is off",
        only(0, 1),
        "ZeRO++'s second copy of the weights per node (hpZ over {} ranks) is not implemented.",
        "1, or leave it out.",
    ),
    "zero_quantized_weights": off("it is off", "ZeRO++'s quantised gathering of weights"),
    "zero_quantized_nontrainable_weights": off("it is off", "quantised storage of frozen weights"),
    "zero_quantized_gradients": off("it is off", "ZeRO++'s quantised reduction of gradients"),
    "zeropp_loco_param": Idle("", never, "LoCo's error feedback is not implemented.", "leave it out."),
    "mics_shard_size": Idle(
        "it is off",
        only(-1, 0),
        "MiCS sharding over {} ranks is not implemented: ZeRO shards over all dp ranks.",
        "leave it out.",
    ),
    "mics_hierarchical_params_gather": off("it is off", "MiCS's gathering in two steps"),
    "zenflow": Idle(
        "", never, "ZenFlow updates some weights late, which changes the mathematics; not implemented.", "remove it."
    ),
}
OFFLOAD: dict[str, Idle] = {
    **dict.fromkeys(("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"), Idle(_NO_NVME)),
    **dict.fromkeys(("pipeline", "pipeline_read", "pipeline_write", "fast_init"), Idle(_NO_NVME)),
    "super_offload": off("it is off", "SuperOffload"),
    "cpuadam_cores_perc": Idle("it concerns SuperOffload, which is not used"),
}

FP16: dict[str, Idle] = {
    "auto_cast": Idle("the inputs are token numbers: there is nothing to cast"),
    "fp16_master_weights_and_grads": off("master weights are fp32", "fp16 master weights"),
}
BF16: dict[str, Idle] = {
    "immediate_grad_update": Idle("gradients are added to the fp32 buffer as they come"),
    "check_grad_overflow": Idle("bf16 has the range of fp32: there is no loss scale and no step is skipped"),
    "check_overflow": Idle("bf16 has the range of fp32: there is no loss scale and no step is skipped"),
    "bf16_master_weights_and_grads": off("master weights are fp32", "bf16 master weights and gradients"),
    "bf16_optimizer_states": off("optimizer states are fp32", "bf16 optimizer states"),
}

OPTIMIZER: dict[str, Idle] = {"legacy_fusion": Idle("it chooses one of Apex's implementations; the update is the same")}
_SAME_UPDATE = "it chooses an implementation; the update is the same"
OPTIMIZER_PARAMS: dict[str, Idle] = {
    **dict.fromkeys(
        ("torch_adam", "fused", "foreach", "capturable", "differentiable", "set_grad_none"), Idle(_SAME_UPDATE)
    ),
    "bias_correction": Idle(
        "Adam's bias correction is always on",
        only(True),
        "Adam without bias correction is not implemented.",
        "true, or leave it out.",
    ),
    "amsgrad": off("it is off", "AMSGrad"),
    "maximize": off("it is off", "maximising"),
    "dampening": Idle(
        "it is off", only(0, 0.0), "dampening of the momentum is not implemented.", "0, or leave it out."
    ),
    "fp32_optimizer_states": Idle(
        "optimizer states are fp32",
        only(True),
        "optimizer states in half precision are not implemented.",
        "true, or leave it out.",
    ),
    "max_grad_norm": Idle(
        "", never, "clipping is not the optimizer's: DeepSpeed refuses max_grad_norm here too.", "gradient_clipping {}."
    ),
}
SCHEDULER_PARAMS: dict[str, Idle] = {
    "last_batch_iteration": Idle(
        "the schedule starts at the first step",
        only(-1),
        "a checkpoint says where the schedule goes on, not the config.",
        "-1, or leave it out.",
    ),
}

TENSOR_PARALLEL: dict[str, Idle] = {
    "tp_overlap_comm": Idle("the input-gradient all-reduce always overlaps the weight gradient"),
    "preset_model": Idle("the model itself says how its layers are cut"),
    "dtype": Idle("the precision section decides"),
    "keep_module_on_host": Idle("weights are drawn or read by slices, straight onto the device"),
    "vocab_parallel_ce_backend": Idle("the cross-entropy over the cut vocabulary has one implementation"),
    "vocab_parallel_lm_head": Idle(
        "the output head is always cut by vocabulary",
        only(True),
        "the output head is always cut by vocabulary; a whole one would change the memory.",
        "true, or leave it out.",
    ),
    "partition_config": Idle(
        "",
        never,
        "cutting rules stand in the program (a plan: module name -> how it is cut), not in the file.",
        "remove it.",
    ),
    "injection_policy_tuple": Idle(
        "",
        never,
        "cutting rules stand in the program (a plan: module name -> how it is cut), not in the file.",
        "remove it.",
    ),
    "kernel_inject": off("it is off", "injection of inference kernels"),
    "replace_with_kernel_inject": off("it is off", "injection of inference kernels"),
}
AUTOTP: dict[str, Idle] = {
    "tp_grain_size": Idle("heads and MLP columns are dealt evenly"),
}

PIPELINE: dict[str, Idle] = {
    "seed_layers": Idle("every parameter is drawn from (seed, name), the same at every layout"),
    "pipe_partitioned": Idle("each tp rank sends its own activation (its slice under sequence_parallel)"),
    "grad_partitioned": Idle("each tp rank sends its own gradient (its slice under sequence_parallel)"),
    "use_reentrant": Idle("recomputation has one implementation"),
}

_CHECKPOINTS = "it tunes DeepSpeed's recomputation buffers; the result is the same"
ACTIVATION_CHECKPOINTING: dict[str, Idle] = {
    "contiguous_memory_optimization": Idle(_CHECKPOINTS),
    "number_checkpoints": Idle(_CHECKPOINTS),
    "synchronize_checkpoint_boundary": Idle(_CHECKPOINTS),
    "profile": Idle(_LOGS),
    "partition_activations": off(
        "it is off", "dealing saved activations over the tp ranks", "false; tensor_parallel.sequence_parallel does it."
    ),
    "cpu_checkpointing": off(
        "it is off", "saving activations on the host", "false; activation_checkpointing.policy full keeps less."
    ),
}

IDLE: dict[str, dict[str, Idle]] = {
    "": TOP,
    "data_types": DATA_TYPES,
    "compile": COMPILE,
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": OFFLOAD,
    "zero_optimization.offload_param": OFFLOAD,
    "fp16": FP16,
    "bf16": BF16,
    "optimizer": OPTIMIZER,
    "optimizer.params": OPTIMIZER_PARAMS,
    "scheduler.params": SCHEDULER_PARAMS,
    "tensor_parallel": TENSOR_PARALLEL,
    "tensor_parallel.tp": AUTOTP,
    "pipeline": PIPELINE,
    "activation_checkpointing": ACTIVATION_CHECKPOINTING,
}
"""Section path -> key -> what is known of it."""
