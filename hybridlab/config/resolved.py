"""What the engine reads: a configuration with every value settled, checked, and free of "auto"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hybridlab.config.specs import REQUIRED, SCHEDULERS, LossScaleSpec, OptimizerSpec, SchedulerSpec
from hybridlab.plan.layout import Layout

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Zero:
    """What the data-parallel ranks shard. Sizes are numbers of elements, not bytes.

    Attributes:
        stage: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        gradient_policy: "accumulate_then_scatter" (whole local gradients, reduced once a step) or
            "scatter_every_microbatch" (sharded gradients, reduced once a micro-batch).
        reduce_bucket_size: gradients reduced in one message.
        allgather_bucket_size: updated weights gathered in one message, stages 1 and 2.
        prefetch_bucket_size: stage 3 gathers so much ahead of use.
        persistence_threshold: stage 3 never shards parameters of fewer elements.
        max_live_parameters: stage 3 keeps no more gathered elements at one time.
        max_reuse_distance: stage 3 keeps a parameter gathered when it is used again within so many elements.
        overlap_comm: reduce while backward goes on.
        offload_optimizer: the optimizer's shard and update live on the host.
        offload_param: the parameters' shards live on the host (stage 3).
        pin_memory: host buffers are page-locked where there is a GPU.
    """

    stage: int = 0
    gradient_policy: str = "accumulate_then_scatter"
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    overlap_comm: bool = True
    offload_optimizer: bool = False
    offload_param: bool = False
    pin_memory: bool = True


@dataclass(frozen=True)
class Resolved:
    """Everything a run needs to know, but the model and the data.

    Attributes:
        layout: the degrees dp, tp and pp.
        train_batch_size: sequences per optimizer step; = micro_batch_size * micro_batches * dp.
        micro_batch_size: sequences per replica that go through the model together.
        micro_batches: micro-batches per replica and step (gradient accumulation; the m of the pipeline).
        sequence_length: tokens per sequence.
        seed: of weights, data order and dropout.
        precision: one of `PRECISIONS`.
        schedule, virtual_stages: the pipeline's schedule and model chunks per rank; "1f1b" and 1 at pp=1.
        split: layers of each virtual stage; () when the model was not given.
        recompute, recompute_interval: "none", "selective" or "full"; layers recomputed as one group.
        gradient_clipping: largest global gradient norm; 0 is off.
        label_smoothing: share of the target spread evenly over the vocabulary.
        vocab_multiple: each tp rank's rows of the vocabulary are padded to a multiple of this.
        attention: "sdpa" or "eager".
        compile: torch.compile the blocks.
    """

    layout: Layout
    train_batch_size: int
    micro_batch_size: int
    micro_batches: int
    sequence_length: int
    seed: int = 1234
    precision: str = "fp32"
    zero: Zero = field(default_factory=Zero)
    schedule: str = "1f1b"
    virtual_stages: int = 1
    split: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_interval: int = 1
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    scheduler: SchedulerSpec | None = None
    gradient_clipping: float = 1.0
    loss_scale: LossScaleSpec = field(default_factory=LossScaleSpec)
    label_smoothing: float = 0.0
    vocab_multiple: int = 1
    attention: str = "sdpa"
    compile: bool = False

    @property
    def needs_steps(self) -> bool:
        """Whether the schedule waits to be told how long the run is (``total_num_steps: "auto"``)."""
        if self.scheduler is None:
            return False
        defaults = SCHEDULERS[self.scheduler.type]
        return defaults.get("total_num_steps") is REQUIRED and "total_num_steps" not in self.scheduler.params

    def with_steps(self, steps: int) -> Resolved:
        """The same, for a run of ``steps`` optimizer steps: fills in what waits for that number, if anything."""
        if self.scheduler is None or not self.needs_steps:
            return self
        params = {**self.scheduler.params, "total_num_steps": steps}
        return replace(self, scheduler=replace(self.scheduler, params=params))

    def to_json(self) -> dict[str, Any]:
        """The effective config under DeepSpeed's names where it has them: `explain`'s ``resolved``."""
        scheduler = self.scheduler
        return {
            "train_batch_size": self.train_batch_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.micro_batches,
            "world": self.layout.world,
            "dp": self.layout.dp,
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "precision": self.precision,
            "zero": asdict(self.zero),
            "schedule": self.schedule,
            "virtual_stages": self.virtual_stages,
            "split": list(self.split),
            "sequence_parallel": self.sequence_parallel,
            "recompute": self.recompute,
            "recompute_interval": self.recompute_interval,
            "optimizer": asdict(self.optimizer),
            "scheduler": {"type": scheduler.type, "params": _plain(scheduler.params)} if scheduler else None,
            "gradient_clipping": self.gradient_clipping,
            "loss_scale": asdict(self.loss_scale) if self.precision == "fp16" else None,
            "label_smoothing": self.label_smoothing,
            "vocab_multiple": self.vocab_multiple,
            "attention": self.attention,
            "compile": self.compile,
        }


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    return dict(params)
