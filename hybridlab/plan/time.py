"""How long a step takes: compute, the messages it cannot hide, the pipeline's idle time, the update.

1. *Compute* of each virtual stage: matrix products at a width-dependent share of the peak (`Device.efficiency`), and
   element-wise work (norms, dropout, activations, eager scores) at the rate of the card's memory.
2. *Tensor parallelism*: its sums stand in the way of forward. In backward the sum of an input's gradient travels while
   the weight's gradient is computed.
3. *The pipeline*: `hybridlab.schedule.simulate` plays the schedule with the stages' times and the latency of messages.
4. *Data parallelism*: gradients hide behind backward as far as it lasts; ZeRO-3's gathers behind the piece before.
5. *The update*: bytes of the states past the card's memory; offloaded, over PCIe and by the host's processors.

The model is calibrated against published iteration times (Korthikanti et al., arXiv:2205.05198, Table 5; A100): see
``tests/plan``. It ranks layouts; it does not promise seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hybridlab.plan.cluster import Cluster
from hybridlab.plan.collectives import collective_seconds, send_seconds
from hybridlab.plan.flops import attention_flops, head_flops, matrix_flops, model_flops, utilisation
from hybridlab.plan.job import Job
from hybridlab.plan.states import PRECISIONS
from hybridlab.plan.traffic import activation_bytes

# Element-wise passes over activations in one layer's forward, in tensors read or written.
HIDDEN_PASSES = 14  # two norms (read, write), two residual sums (two reads, a write), dropout or rounding, copies
GATED_PASSES = 4  # read gate and up, write silu, write the product
PLAIN_PASSES = 3  # read, write, and the bias
ROTARY_PASSES = 2  # read and write q and k
SCORE_PASSES = 7  # eager: scale and mask, softmax (read, write), dropout (read, write), and the products' own reads
UPDATE_BYTES = 34  # per element: gradient 4, master, two states read and written 24, weight 2, norm 4
LOGIT_PASSES = 4


@dataclass(frozen=True)
class StageTime:
    """Seconds of one virtual stage for one micro-batch, its tensor-parallel messages included.

    Attributes:
        forward: F.
        input_grad: I, with what recomputation runs again.
        weight_grad: W.
        compute: of F + I + W, the part that is arithmetic.
        messages: of F + I + W, the part that waits for tensor-parallel messages.
    """

    forward: float
    input_grad: float
    weight_grad: float
    compute: float
    messages: float

    @property
    def total(self) -> float:
        """F + I + W."""
        return self.forward + self.input_grad + self.weight_grad


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step and where they go.

    Attributes:
        step: all of it.
        pipeline: from the first forward to the last backward.
        compute: arithmetic of the busiest rank.
        tensor: tensor-parallel messages of the busiest rank that stand in the way.
        bubble: the rest of ``pipeline``: waiting for other stages.
        data: data-parallel messages that nothing hides.
        update: the optimizer, on the device or (with PCIe) on the host.
        idle_fraction: idle over makespan in the pipeline, mean of ranks.
        mfu: model-FLOPs utilisation of the whole step.
        simulated: the pipeline's time comes from the event simulator, not from the closed form.
    """

    step: float
    pipeline: float
    compute: float
    tensor: float
    bubble: float
    data: float
    update: float
    idle_fraction: float
    mfu: float
    simulated: bool


def layer_seconds(job: Job, cluster: Cluster) -> tuple[float, float, float]:
    """Forward seconds of one layer for one micro-batch: (matrix products, attention's part of them, element-wise)."""
    shape, device, tp = job.shape, cluster.device, job.layout.tp
    width = min(shape.hidden, shape.ffn // tp, max(1, shape.heads * shape.head_dim // tp))
    rate = device.peak_flops[job.precision] * device.efficiency(width)
    attention = job.tokens * attention_flops(shape, job.sequence_length) / tp / rate
    matrices = job.tokens * matrix_flops(shape) / tp / rate
    elements = HIDDEN_PASSES * shape.hidden / (tp if job.slices_sequence else 1)
    elements += (GATED_PASSES if shape.gated else PLAIN_PASSES) * shape.ffn / tp
    if shape.positions == "rotary":
        elements += ROTARY_PASSES * (shape.heads + shape.kv_heads) * shape.head_dim / tp
    scores = SCORE_PASSES * shape.heads * job.sequence_length / tp if job.attention == "eager" else 0
    moved = job.tokens * PRECISIONS[job.precision].weight / device.memory_bytes_per_second
    return matrices + attention, attention + scores * moved, (elements + scores) * moved


def stage_time(job: Job, cluster: Cluster, stage: int) -> StageTime:
    """Seconds of a virtual stage for one micro-batch."""
    shape, device, tp = job.shape, cluster.device, job.layout.tp
    layers = len(job.layers_of(stage))
    products, attention, elementwise = layer_seconds(job, cluster)
    products, attention, elementwise = layers * products, layers * attention, layers * elementwise
    head = 0.0
    if stage == job.stages - 1:
        rate = device.peak_flops[job.precision] * device.efficiency(min(shape.hidden, max(1, shape.vocab // tp)))
        head = job.tokens * head_flops(shape) / tp / rate
        elementwise += LOGIT_PASSES * job.tokens * shape.vocab / tp * 4 / device.memory_bytes_per_second
    whole = job.tokens * shape.hidden * PRECISIONS[job.precision].weight
    message = collective_seconds(cluster, "all_reduce", tp, 1, whole)  # a scatter and a gather take as long together
    ends = (stage == 0) + (stage == job.stages - 1)
    forward_messages = (2 * layers + ends) * message
    exposed_backward = (2 * layers + ends) * max(0.0, message - (products + head) / (2 * layers + 1) / 2)
    again = {"none": 0.0, "selective": attention, "full": products + elementwise}[job.recompute]
    again_messages = 2 * layers * message if job.recompute == "full" else 0.0
    return StageTime(
        forward=products + head + elementwise + forward_messages,
        input_grad=products + head + 1.5 * elementwise + again + exposed_backward + again_messages,
        weight_grad=products + head,
        compute=3 * (products + head) + 2.5 * elementwise + again,
        messages=forward_messages + exposed_backward + again_messages,
    )


# ---- the pipeline ------------------------------------------------------------------------------------------------------


def closed_form(name: str, times: list[StageTime], chunks: int, micro_batches: int, latency: float) -> float:
    """Seconds of a pipeline without playing it: what the search sorts by before it simulates the best.

    The slowest rank is never idle but for filling and draining, (p-1)(F+B) under 1F1B; each round trip of p micro-batches
    pays the latency of 2(p-1) messages, which formulas without communication leave out.

    Args:
        times: of every virtual stage, in order.
    """
    ranks, m = len(times) // chunks, micro_batches
    if ranks == 1:
        return m * sum(t.total for t in times)
    loads = [0.0] * ranks
    for stage, time in enumerate(times):
        loads[_rank(stage, ranks, name)] += time.total
    slowest = max(loads)
    rest = (sum(loads) - slowest) / chunks
    w = sum(t.weight_grad for t in times) / len(times)
    saved = {"zb-h1": 2 * w, "zb-h2": 3 * w, "zb-v": 3 * w}.get(name, 0.0) * (ranks - 1)
    round_trips = 2 * (ranks - 1) * latency * m * chunks / (m if name == "gpipe" else ranks)
    return m * slowest + max(0.0, rest - saved) + round_trips + (2 * ranks - 4) * latency


def _rank(stage: int, ranks: int, name: str) -> int:
    return rank_of_stage(stage, ranks, SCHEDULES[name].placement if name in SCHEDULES else "loop")
