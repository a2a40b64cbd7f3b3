"""The keys that have an effect, section by section, with their types, defaults and what each does.

Spellings are DeepSpeed's where DeepSpeed has the key. Ours alone: `data_parallel`, `pipeline_parallel`, `fp64`,
`hybridlab`, `tensor_parallel.sequence_parallel` and `.vocab_multiple`, `zero_optimization.gradient_policy`,
`activation_checkpointing.policy` and `.interval`. Keys that are known but have no effect stand in `keys.py`.

A description says, in one phrase, what the key does: `explain` prints it as the "how" of a used key.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hybridlab.config.specs import OPTIMIZERS, SCHEDULERS, WARMUP_TYPES
from hybridlab.config.values import BETAS, LAYER_COUNTS, SWITCH, real, whole, word
from hybridlab.plan.legality import GRADIENT_POLICIES, SCHEDULES
from hybridlab.plan.split import PARTITIONS

SAME_WORLD_LIMIT = 2**31 - 1
ELEMENTS = 2**63 - 1

_NO_NVME = (
    "nvme offload is not implemented; cpu is.",
    "cpu, or none.",
)
_OTHER_OPTIMIZERS = {
    name.lower(): (f"the optimizer {name} is not implemented: {why}", f"{near}.")
    for name, near, why in (
        ("OneBitAdam", "AdamW", "it compresses what ranks exchange."),
        ("OnebitAdam", "AdamW", "it compresses what ranks exchange."),
        ("ZeroOneAdam", "AdamW", "it compresses what ranks exchange."),
        ("OneBitLamb", "AdamW", "it compresses what ranks exchange."),
        ("Lamb", "AdamW", "its update is not Adam's."),
        ("Lion", "AdamW", "its update is not Adam's."),
        ("Adagrad", "Adam", "its update is not Adam's."),
        ("Muon", "AdamW", "its update is not Adam's."),
        ("MuAdam", "Adam", "it needs the mup package's parameter groups."),
        ("MuAdamW", "AdamW", "it needs the mup package's parameter groups."),
        ("MuSGD", "SGD", "it needs the mup package's parameter groups."),
        ("RMSprop", "Adam", "its update is not Adam's."),
        ("Adafactor", "AdamW", "its update is not Adam's."),
    )
}
_OTHER_SCHEDULERS = {
    name.lower(): (f"the scheduler {name} is not implemented: {why}", f"{near}.")
    for name, near, why in (
        ("OneCycle", "WarmupDecayLR", "it cycles the momentum too."),
        ("LRRangeTest", "WarmupLR with warmup_type linear", "it is a search for a learning rate, not a schedule."),
        ("WSD", "WarmupDecayLR", "DeepSpeed does not have it either."),
    )
}


class Section(BaseModel):
    """A JSON object whose keys are all known."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerParams(Section):
    """The constants of the update rule."""

    lr: Annotated[float, real(0)] = Field(default=1e-3, description="the learning rate before any schedule")
    betas: Annotated[tuple[float, float], BETAS] = Field(
        default=(0.9, 0.999), description="decay of the two moments (Adam, AdamW)"
    )
    eps: Annotated[float, real(0)] = Field(default=1e-8, description="added to the denominator (Adam, AdamW)")
    weight_decay: Annotated[float, real(0)] = Field(
        default=0.0, description="decoupled (AdamW) or added to the gradient (Adam, SGD)"
    )
    adam_w_mode: Annotated[bool, SWITCH] = Field(
        default=False, description='true makes "Adam" an AdamW; DeepSpeed does that unless it is false'
    )
    momentum: Annotated[float, real(0, 1, open_high=True)] = Field(default=0.0, description="momentum of SGD")
    nesterov: Annotated[bool, SWITCH] = Field(default=False, description="Nesterov's momentum, of SGD")


class Optimizer(Section):
    """How weights are updated. Without it: AdamW with its defaults (DeepSpeed expects one from the program)."""

    type: Annotated[str, word(*OPTIMIZERS, refused=_OTHER_OPTIMIZERS, what="an optimizer this engine has")] | None = (
        Field(default=None, description="the update rule")
    )
    params: OptimizerParams = Field(default=OptimizerParams(), description="its constants")


class SchedulerParams(Section):
    """The parameters of a learning-rate schedule; which ones a schedule takes depends on its type."""

    warmup_min_lr: Annotated[float, real(0)] = Field(default=0.0, description="where the warm-up starts")
    warmup_max_lr: Annotated[float, real(0)] | None = Field(
        default=None, description="where the warm-up ends; WarmupLR: by default the lr"
    )
    warmup_num_steps: Annotated[int, whole(1)] = Field(
        default=1000, description="optimizer steps of warm-up (at least 2 are done)"
    )
    warmup_type: Annotated[str, word(*WARMUP_TYPES, what="a way to warm up")] = Field(
        default="log", description="how the rate rises"
    )
    total_num_steps: Annotated[int, whole(1)] | None = Field(
        default=None, description="optimizer steps until the decay ends"
    )
    warmup_min_ratio: Annotated[float, real(0, 1)] = Field(
        default=0.0, description="where the warm-up starts, times lr (WarmupCosineLR)"
    )
    cos_min_ratio: Annotated[float, real(0, 1)] = Field(
        default=0.0001, description="where the cosine ends, times lr (WarmupCosineLR)"
    )


class Scheduler(Section):
    """How the learning rate moves, one step per optimizer step. Without it the rate is constant."""

    type: Annotated[str, word(*SCHEDULERS, refused=_OTHER_SCHEDULERS, what="a scheduler this engine has")] | None = (
        Field(default=None, description="the schedule, by DeepSpeed's name")
    )
    params: SchedulerParams = Field(default=SchedulerParams(), description="its parameters")


class Fp16(Section):
    """fp16 with fp32 master weights and a loss scale."""

    enabled: Annotated[bool, SWITCH] = Field(default=False, description="train in fp16")
    loss_scale: Annotated[float, real(0)] = Field(default=0.0, description="a fixed loss scale; 0 means dynamic")
    initial_scale_power: Annotated[int, whole(0, 126)] = Field(
        default=16, description="the dynamic scale starts at 2 to this power"
    )
    loss_scale_window: Annotated[int, whole(1)] = Field(default=1000, description="good steps before the scale doubles")
    hysteresis: Annotated[int, whole(1)] = Field(default=2, description="the overflow that first halves the scale")
    consecutive_hysteresis: Annotated[bool, SWITCH] = Field(
        default=False, description="any good step restores the hysteresis"
    )
    min_loss_scale: Annotated[float, real(0, open_low=True)] = Field(
        default=1.0, description="the dynamic scale never goes below"
    )


class Bf16(Section):
    """bf16 with fp32 master weights and fp32 accumulation. It has the range of fp32 and needs no loss scale."""

    enabled: Annotated[bool, SWITCH] = Field(default=False, description="train in bf16")


class Fp64(Section):
    """Double precision throughout, for comparing layouts (ours; DeepSpeed has none)."""

    enabled: Annotated[bool, SWITCH] = Field(default=False, description="train in fp64")


class OffloadOptimizer(Section):
    """Optimizer state and update on the host (ZeRO-Offload, arXiv:2101.06840). Needs stage 1, 2 or 3."""

    device: Annotated[str, word("none", "cpu", refused={"nvme": _NO_NVME}, what="an offload device")] = Field(
        default="none", description="where the optimizer state lives"
    )
    pin_memory: Annotated[bool, SWITCH] = Field(
        default=True, description="page-locked host memory, so that copies overlap; only with a GPU"
    )
    ratio: Annotated[float, real(0, 1)] = Field(
        default=1.0, description="the share of the optimizer that is offloaded; only 1 is implemented"
    )


class OffloadParam(Section):
    """Parameter shards on the host. Needs stage 3."""

    device: Annotated[str, word("none", "cpu", refused={"nvme": _NO_NVME}, what="an offload device")] = Field(
        default="none", description="where the parameter shards live"
    )
    pin_memory: Annotated[bool, SWITCH] = Field(
        default=True, description="page-locked host memory, so that copies overlap; only with a GPU"
    )


class ZeroOptimization(Section):
    """What the data-parallel ranks shard among them (ZeRO, arXiv:1910.02054). `true` is the old form of stage 1."""

    stage: Annotated[int, whole(0, 3)] = Field(
        default=0, description="0 replicates all; 1 shards optimizer states, 2 gradients too, 3 parameters too"
    )
    gradient_policy: (
        Annotated[
            str,
            word(
                *dict.fromkeys(policy for policies in GRADIENT_POLICIES.values() for policy in policies),
                what="a gradient policy",
            ),
        ]
        | None
    ) = Field(default=None, description="when gradients are scattered under several micro-batches")
    reduce_bucket_size: Annotated[int, whole(1, ELEMENTS)] = Field(
        default=500_000_000, description="elements of gradients reduced in one message"
    )
    allgather_bucket_size: Annotated[int, whole(1, ELEMENTS)] = Field(
        default=500_000_000, description="elements of updated weights gathered in one message (stages 1 and 2)"
    )
    overlap_comm: Annotated[bool, SWITCH] = Field(default=True, description="reduce gradients while backward goes on")
    offload_optimizer: OffloadOptimizer = Field(default=OffloadOptimizer(), description="optimizer on the host")
    offload_param: OffloadParam = Field(default=OffloadParam(), description="parameter shards on the host")
    stage3_prefetch_bucket_size: Annotated[int, whole(0, ELEMENTS)] = Field(
        default=50_000_000, description="elements of parameters gathered ahead of use"
    )
    stage3_param_persistence_threshold: Annotated[int, whole(0, ELEMENTS)] = Field(
        default=100_000, description="parameters of fewer elements are never sharded"
    )
    stage3_model_persistence_threshold: Annotated[int, whole(0)] | None = Field(
        default=None, description="a limit on all unsharded parameters together: 0 shards every one, or no limit"
    )
    stage3_max_live_parameters: Annotated[int, whole(0, ELEMENTS)] = Field(
        default=1_000_000_000, description="gathered elements kept at one time"
    )
    stage3_max_reuse_distance: Annotated[int, whole(0, ELEMENTS)] = Field(
        default=1_000_000_000, description="a parameter used again within so many elements stays gathered"
    )


class AutoTp(Section):
    """DeepSpeed's second spelling of the tensor-parallel degree."""

    tp_size: Annotated[int, whole(1, SAME_WORLD_LIMIT)] = Field(default=1, description="ranks that share each layer")


class TensorParallel(Section):
    """Layers cut over ranks (Megatron-LM, arXiv:1909.08053)."""

    tp_size: Annotated[int, whole(1, SAME_WORLD_LIMIT)] = Field(default=1, description="ranks that share each layer")
    autotp_size: Annotated[int, whole(0, SAME_WORLD_LIMIT)] = Field(
        default=0, description="ranks that share each layer; 0 is off"
    )
    tp: AutoTp = Field(default=AutoTp(), description="DeepSpeed's second spelling")
    sequence_parallel: Annotated[bool, SWITCH] = Field(
        default=False, description="also cut the activations between the layers, along the sequence (arXiv:2205.05198)"
    )
    vocab_multiple: Annotated[int, whole(1, 2**20)] = Field(
        default=1, description="each rank's share of the vocabulary is padded to a multiple of this"
    )


class DataParallel(Section):
    """The number of replicas. It follows from the world; a file that states it is checked against the world."""

    dp_size: Annotated[int, whole(1, SAME_WORLD_LIMIT)] | None = Field(
        default=None, description="replicas; must be world/(tp*pp)"
    )


class PipelineParallel(Section):
    """Layers dealt out over stages, with micro-batches in flight."""

    pp_size: Annotated[int, whole(1, SAME_WORLD_LIMIT)] = Field(default=1, description="pipeline stages")
    schedule: (
        Annotated[
            str,
            word(
                *SCHEDULES,
                also={
                    "interleaved": "interleaved-1f1b",
                    "interleaved1f1b": "interleaved-1f1b",
                    "zbh1": "zb-h1",
                    "zbh2": "zb-h2",
                    "zbv": "zb-v",
                    "zbvzerobubble": "zb-v",
                },
                what="a schedule",
            ),
        ]
        | None
    ) = Field(default=None, description="the order of forwards and backwards")
    virtual_stages: Annotated[int, whole(1, 1024)] | None = Field(default=None, description="model chunks per rank")
    split: Annotated[tuple[int, ...], LAYER_COUNTS] | None = Field(
        default=None, description="layers of each virtual stage"
    )
    placement: Annotated[str, word("loop", "v", what="a placement")] | None = Field(
        default=None, description="how chunks lie on ranks; checked against the schedule, which decides it"
    )


class Pipeline(Section):
    """DeepSpeed's own pipeline block (DeepSpeed reads the number of stages from the program, not from here)."""

    stages: Annotated[int, whole(1, SAME_WORLD_LIMIT)] | None = Field(
        default=None, description="pipeline stages, as pp_size"
    )
    partition: Annotated[str, word(*PARTITIONS, what="a partition method that is implemented")] | None = Field(
        default=None, description="how layers are dealt: uniform counts, balanced by parameters, or the better"
    )
    activation_checkpoint_interval: Annotated[int, whole(0, 2**20)] = Field(
        default=0, description="recompute whole groups of so many layers; 0 is off"
    )


class ActivationCheckpointing(Section):
    """Activations computed again in backward instead of kept (arXiv:1604.06174)."""

    policy: Annotated[str, word("none", "selective", "full", what="a recomputation policy")] = Field(
        default="none", description="what is recomputed: nothing, attention only, or whole layers"
    )
    interval: Annotated[int, whole(1, 2**20)] = Field(
        default=1, description="layers recomputed as one group, under policy full"
    )


class Hybridlab(Section):
    """What DeepSpeed leaves to the training program."""

    seed: Annotated[int, whole(0, 2**63 - 1)] = Field(
        default=1234, description="weights, data order and dropout follow from it"
    )
    sequence_length: Annotated[int, whole(1, 2**31 - 1)] | None = Field(default=None, description="tokens per sequence")
    label_smoothing: Annotated[float, real(0, 1, open_high=True)] = Field(
        default=0.0, description="share of the target spread evenly"
    )
    attention: Annotated[str, word("sdpa", "eager", what="an attention implementation")] = Field(
        default="sdpa", description="torch's fused attention, or matrix products that keep the scores"
    )
    compile: Annotated[bool, SWITCH] = Field(default=False, description="torch.compile the blocks")


class Config(Section):
    """A training configuration: DeepSpeed's JSON, with our additions."""

    train_batch_size: Annotated[int, whole(1, ELEMENTS)] | None = Field(
        default=None, description="sequences per optimizer step, over all replicas"
    )
    train_micro_batch_size_per_gpu: Annotated[int, whole(1, ELEMENTS)] | None = Field(
        default=None, description="sequences per replica that go through the model together"
    )
    gradient_accumulation_steps: Annotated[int, whole(1, ELEMENTS)] | None = Field(
        default=None, description="micro-batches per replica and optimizer step (the m of the pipeline)"
    )
    gradient_clipping: Annotated[float, real(0)] = Field(
        default=1.0, description="the global gradient norm is cut to this; 0 is off"
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="how weights are updated")
    scheduler: Scheduler = Field(default=Scheduler(), description="how the learning rate moves")
    fp16: Fp16 = Field(default=Fp16(), description="half precision with a loss scale")
    bf16: Bf16 = Field(default=Bf16(), description="bfloat16 with fp32 master weights")
    fp64: Fp64 = Field(default=Fp64(), description="double precision")
    zero_optimization: ZeroOptimization = Field(default=ZeroOptimization(), description="sharding over replicas")
    tensor_parallel: TensorParallel = Field(default=TensorParallel(), description="layers cut over ranks")
    data_parallel: DataParallel = Field(default=DataParallel(), description="replicas")
    pipeline_parallel: PipelineParallel = Field(default=PipelineParallel(), description="stages")
    pipeline: Pipeline = Field(default=Pipeline(), description="DeepSpeed's pipeline block")
    activation_checkpointing: ActivationCheckpointing = Field(
        default=ActivationCheckpointing(), description="recomputation"
    )
    hybridlab: Hybridlab = Field(default=Hybridlab(), description="what DeepSpeed leaves to the program")


def section_of(model: type[BaseModel], key: str) -> type[Section] | None:
    """The section class behind a key, or None when the key holds a value."""
    annotation: Any = model.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def sections(model: type[Section] = Config, path: str = "") -> dict[str, type[Section]]:
    """Every section by its dotted path; the whole config is ""."""
    found = {path: model}
    for key in model.model_fields:
        inner = section_of(model, key)
        if inner is not None:
            found |= sections(inner, f"{path}.{key}" if path else key)
    return found
