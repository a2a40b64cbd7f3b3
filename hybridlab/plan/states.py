"""Model states: bytes of weights, gradients, master weights and optimizer states, by ZeRO stage, precision and place.

Two levels. `model_state_bytes` is the arithmetic of the papers: Ψ parameters, so many bytes each, some of them divided
by the data-parallel degree (Rajbhandari et al., ZeRO, arXiv:1910.02054 §3.1 and Table 1). `device_states` and
`host_states` are what our engine allocates on a given rank, exact to the byte, bucket padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hybridlab.plan.buckets import Bucket, all_buckets, lay_out, share
from hybridlab.plan.job import Job
from hybridlab.report import categories


@dataclass(frozen=True)
class Precision:
    """Bytes per element of everything a training run keeps about a parameter.

    Attributes:
        weight: of the weights that compute, and of activations.
        gradient: of accumulated and reduced gradients.
        master: of a second copy of the weights for the optimizer; 0 when the weights are precise enough themselves.
        state: of one number the optimizer remembers per element.
    """

    weight: int
    gradient: int
    master: int
    state: int

    def total(self, states: int = 2) -> int:
        """Bytes per parameter without any sharding; ``states`` numbers remembered (2 for Adam)."""
        return self.weight + self.gradient + self.master + states * self.state

    @property
    def update(self) -> int:
        """Bytes per element of what the optimizer updates: the master weights, or the weights themselves."""
        return self.master or self.weight


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(2, 4, 4, 4),
    "fp16": Precision(2, 4, 4, 4),
    "fp32": Precision(4, 4, 0, 4),
    "fp64": Precision(8, 8, 0, 8),
}
"""What the engine does: 16-bit runs accumulate and reduce gradients in fp32, 18 bytes a parameter with Adam."""

PAPER_PROFILES: dict[str, Precision] = {
    "zero": Precision(2, 2, 4, 4),
    "megatron": Precision(2, 4, 4, 4),
}
"""Other people's accounts. ZeRO keeps gradients in fp16: 16 bytes; Megatron-LM's main gradients are fp32: 18."""


def model_state_bytes(
    parameters: float, dp: int, stage: int, precision: Precision, states: int = 2
) -> dict[str, float]:
    """Bytes per device of Ψ parameters, by category, as the ZeRO paper counts (no padding, no buffers).

    Stage 1 divides master weights and optimizer states by dp, stage 2 gradients too, stage 3 weights too. With the
    profile "zero": 16Ψ; 4Ψ + 12Ψ/dp; 2Ψ + 14Ψ/dp; 16Ψ/dp (Table 1).
    """
    return {
        "weights": precision.weight * parameters / (dp if stage >= 3 else 1),
        "gradients": precision.gradient * parameters / (dp if stage >= 2 else 1),
        "master_weights": precision.master * parameters / (dp if stage >= 1 else 1),
        "optimizer": states * precision.state * parameters / (dp if stage >= 1 else 1),
    }


def largest_model(memory_bytes: float, dp: int, mp: int, stage: int, precision: Precision) -> float:
    """Most parameters whose model states fit ``memory_bytes`` on each of dp x mp devices (ZeRO, Table 2)."""
    per_parameter = sum(model_state_bytes(1, dp, stage, precision).values())
    return mp * memory_bytes / per_parameter


# ---- what the engine allocates -------------------------------------------------------------------------------------


def device_states(job: Job, pp: int) -> dict[str, int]:
    """Long-lived bytes on the device of a rank, by category. The same on every tp and dp rank of a pipeline rank.

    Gradients are those that live as long as the engine; at ZeRO-2 and 3 whole ones come and go (`transient_gradients`).
    """
    numbers, zero = PRECISIONS[job.precision], job.zero
    found = categories()
    for bucket in all_buckets(job, pp):
        mine = share(job, bucket)
        borrowed = zero.stage == 3 and not bucket.persistent
        if not borrowed:
            found["weights"] += numbers.weight * bucket.numel
        else:
            found["other"] += numbers.weight  # one element stands for the weights that are away
            if not zero.offload_param:
                found["weights"] += numbers.weight * mine
        found["gradients"] += numbers.gradient * (mine if zero.stage >= 2 else bucket.numel)
        if not zero.offload_optimizer:
            elsewhere = borrowed and zero.offload_param
            found["master_weights"] += (numbers.update if elsewhere else numbers.master) * mine
            found["optimizer"] += job.optimizer_states * numbers.state * mine
    return found


def host_states(job: Job, pp: int) -> dict[str, int]:
    """Long-lived bytes in host memory of one rank, by category.

    Optimizer offload keeps master weights, a landing place for gradients, and the optimizer's states there (16 bytes
    per owned parameter with Adam); parameter offload the shards of the weights.
    """
    numbers, zero = PRECISIONS[job.precision], job.zero
    found = categories()
    for bucket in all_buckets(job, pp):
        mine = share(job, bucket)
        if zero.offload_param and zero.stage == 3 and not bucket.persistent:
            found["weights"] += numbers.weight * mine
        if zero.offload_optimizer:
            found["master_weights"] += numbers.update * mine
            found["gradients"] += numbers.gradient * mine
            found["optimizer"] += job.optimizer_states * numbers.state * mine
    return found


def transient_gradients(job: Job, pp: int) -> int:
    """Most bytes of whole gradient buckets alive at once beside the persistent ones.

    Scattered every micro-batch: one bucket fills while the one before is under way. Accumulated first: all of them,
    from the first backward to the step's end. Stages 0 and 1 have none: theirs are persistent.
    """
    zero, width = job.zero, PRECISIONS[job.precision].gradient
    if zero.stage < 2:
        return 0
    if not zero.every_micro_batch:
        return width * sum(bucket.numel for bucket in all_buckets(job, pp))
    most = 0
    for chunk in lay_out(job, pp):
        sizes = [bucket.numel for bucket in chunk if not bucket.late]
        most = max([most, *(a + b for a, b in pairwise(sizes)), *sizes[:1]])
    return width * most


def gathered_weights(job: Job, pp: int) -> int:
    """Most bytes of borrowed weights alive at once at ZeRO-3: the piece that computes and, prefetched, the next."""
    if job.zero.stage < 3:
        return 0
    width = PRECISIONS[job.precision].weight
    most = 0
    for chunk in lay_out(job, pp):
        units = [_unit(chunk, index) for index in sorted({b.piece for b in chunk if b.piece >= 0})]
        tied = sum(b.numel for b in chunk if b.tied)
        pairs = [a + b for a, b in pairwise(units)] if job.zero.prefetch else []
        most = max([most, *pairs, *units]) + tied if units else max(most, tied)
    return width * most


def _unit(chunk: list[Bucket], piece: int) -> int:
    return sum(bucket.numel for bucket in chunk if bucket.piece == piece)
