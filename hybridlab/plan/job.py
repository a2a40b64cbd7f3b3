"""A training job as the planner sees it: the model, the layout, the batch, and every choice that costs bytes or time.

The fields are those of a resolved config under the same names, without what costs nothing (learning rate, seed). The
planner must not know the config package, so `Job.of` copies what it needs from any object that has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hybridlab.plan.layout import Layout
from hybridlab.plan.legality import GRADIENT_POLICIES, SCHEDULES
from hybridlab.plan.split import choose_split, rank_of_stage

if TYPE_CHECKING:
    from hybridlab.shapes import ModelShape


@dataclass(frozen=True)
class Zero:
    """ZeRO's choices. Sizes and thresholds are in elements.

    Attributes:
        stage: 0 to 3.
        gradient_policy: "accumulate_then_scatter" or "scatter_every_microbatch"; "": the stage's default.
        reduce_bucket_size: most elements of a bucket at stages 0 to 2.
        persistence_threshold: at stage 3, parameters of at most as many elements stay gathered.
        prefetch: at stage 3, gather the next piece while one computes.
        offload_optimizer, offload_param: keep master weights and states, or also the weight shards, on the host.
    """

    stage: int = 0
    gradient_policy: str = ""
    reduce_bucket_size: int = 500_000_000
    persistence_threshold: int = 100_000
    prefetch: bool = True
    offload_optimizer: bool = False
    offload_param: bool = False

    def __post_init__(self) -> None:
        if not self.gradient_policy:
            object.__setattr__(self, "gradient_policy", GRADIENT_POLICIES[self.stage][0])

    @property
    def every_micro_batch(self) -> bool:
        """Whether gradients are scattered after each micro-batch's backward, so that no whole gradient is ever kept."""
        return self.stage == 3 or (self.stage == 2 and self.gradient_policy == "scatter_every_microbatch")


@dataclass(frozen=True)
class Job:
    """Everything about a run that memory, traffic and time depend on.

    Attributes:
        shape: the model.
        layout: the degrees of dp, tp, pp.
        micro_batch_size: sequences b of one micro-batch on one replica.
        micro_batches: m per step and replica.
        sequence_length: tokens s of a sequence.
        precision: a key of `hybridlab.plan.states.PRECISIONS`.
        schedule: a pipeline schedule's name; of no meaning at pp = 1.
        virtual_stages: model chunks per rank.
        split: layers of each virtual stage; (): chosen by `hybridlab.plan.split`.
        recompute: "none", "selective" or "full"; ``recompute_interval`` layers are recomputed as one.
        optimizer_states: numbers remembered per element: 2 for Adam, 1 for momentum, 0 for plain SGD.
        vocab_multiple: the vocabulary is padded to a multiple of tp times this.
        attention: "sdpa" (flash: no scores are kept) or "eager".
    """

    shape: ModelShape
    layout: Layout = field(default_factory=Layout)
    micro_batch_size: int = 1
    micro_batches: int = 1
    sequence_length: int = 2048
    precision: str = "bf16"
    zero: Zero = field(default_factory=Zero)
    schedule: str = "1f1b"
    virtual_stages: int = 1
    split: tuple[int, ...] = ()
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_interval: int = 1
    optimizer_states: int = 2
    vocab_multiple: int = 1
    attention: str = "sdpa"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not self.split:
            split, _ = choose_split(self.shape, self.layout.pp, self.virtual_stages, self.placement)
            object.__setattr__(self, "split", split)
        if len(self.split) != self.stages or sum(self.split) != self.shape.layers:
            raise ValueError(
                f"split {self.split} does not deal {self.shape.layers} layers to {self.stages} virtual stages"
            )

    @property
    def placement(self) -> str:
        """How virtual stages lie on ranks: "loop" or "v"."""
        return SCHEDULES[self.schedule].placement if self.layout.pp > 1 and self.schedule in SCHEDULES else "loop"

    @property
    def stages(self) -> int:
        """Virtual stages in all."""
        return self.layout.pp * self.virtual_stages

    @property
    def global_batch(self) -> int:
        """Sequences per step over all replicas."""
        return self.micro_batch_size * self.micro_batches * self.layout.dp

    @property
    def slices_sequence(self) -> bool:
        """Whether activations between cut layers hold s/tp positions."""
        return self.sequence_parallel and self.layout.tp > 1

    @property
    def tokens(self) -> int:
        """Tokens b·s of one micro-batch."""
        return self.micro_batch_size * self.sequence_length

    def stages_of(self, pp: int) -> list[int]:
        """The virtual stages on a pipeline rank, in order of its chunks."""
        return [s for s in range(self.stages) if rank_of_stage(s, self.layout.pp, self.placement) == pp]

    def layers_of(self, stage: int) -> range:
        """The layers of a virtual stage."""
        begin = sum(self.split[:stage])
        return range(begin, begin + self.split[stage])

    @property
    def tied_apart(self) -> bool:
        """Whether a tied embedding has two copies, on different ranks: not at pp = 1, nor in a V placement."""
        last = rank_of_stage(self.stages - 1, self.layout.pp, self.placement)
        return self.shape.tied and last != 0

    def change(self, **fields: Any) -> Job:
        """The same job with other choices; the split is chosen anew unless given."""
        fields.setdefault("split", ())
        return replace(self, **fields)

    @staticmethod
    def of(resolved: Any, shape: ModelShape) -> Job:
        """The job of a resolved config (`hybridlab.config.Resolved`) for a model."""
        zero = resolved.zero
        optimizer = resolved.optimizer
        states = 2 if optimizer.type in ("Adam", "AdamW") else int(bool(optimizer.momentum))
        return Job(
            shape=shape,
            layout=resolved.layout,
            micro_batch_size=resolved.micro_batch_size,
            micro_batches=resolved.micro_batches,
            sequence_length=resolved.sequence_length,
            precision=resolved.precision,
            zero=Zero(
                stage=zero.stage,
                gradient_policy=zero.gradient_policy,
                reduce_bucket_size=zero.reduce_bucket_size,
                persistence_threshold=zero.persistence_threshold,
                prefetch=zero.prefetch_bucket_size > 0,
                offload_optimizer=zero.offload_optimizer,
                offload_param=zero.offload_param,
            ),
            schedule=resolved.schedule,
            virtual_stages=resolved.virtual_stages,
            split=tuple(resolved.split),
            sequence_parallel=resolved.sequence_parallel,
            recompute=resolved.recompute,
            recompute_interval=resolved.recompute_interval,
            optimizer_states=states,
            vocab_multiple=resolved.vocab_multiple,
            attention=resolved.attention,
            label_smoothing=resolved.label_smoothing,
        )
