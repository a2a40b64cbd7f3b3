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
from hybridlab.plan.legality import SCHEDULES
from hybridlab.plan.parameters import rank_parameters
from hybridlab.plan.split import rank_of_stage
from hybridlab.plan.states import PRECISIONS
from hybridlab.plan.traffic import activation_bytes
from hybridlab.schedule import Schedule, Simulation, make_schedule, simulate

# Element-wise passes over activations in one layer's forward, in tensors read or written.
HIDDEN_PASSES = 12  # two norms (read, write), two residual sums (two reads, a write), dropout or copies
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


# ---- the pipeline ----------------------------------------------------------------------------------------------------


def closed_form(name: str, times: list[StageTime], chunks: int, micro_batches: int, latency: float) -> float:
    """Seconds of a pipeline without playing it: what the search sorts by before it simulates the best.

    The slowest rank is never idle but for filling and draining, (p-1)(F+B) under 1F1B; each round trip of p
    micro-batches pays the latency of 2(p-1) messages, which formulas without communication leave out.

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


def play(job: Job, times: list[StageTime], latency: float) -> Simulation:
    """The job's schedule, event by event."""
    return simulate(
        schedule_of(job.schedule, job.layout.pp, job.micro_batches, job.virtual_stages),
        [time.forward for time in times],
        [time.input_grad for time in times],
        [time.weight_grad for time in times],
        latency,
    )


@lru_cache(maxsize=16)
def schedule_of(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """`hybridlab.schedule.make_schedule`, remembered: thousands of actions take longer than a formula."""
    return make_schedule(name, stages, micro_batches, chunks=chunks)


def _rank(stage: int, ranks: int, name: str) -> int:
    return rank_of_stage(stage, ranks, SCHEDULES[name].placement if name in SCHEDULES else "loop")


def exposed_data_seconds(job: Job, cluster: Cluster, pp: int, times: list[StageTime]) -> float:
    """Seconds of data-parallel messages of a pipeline rank that no computation hides, per step.

    Gradients travel while the backward that makes them goes on, as far as ``cluster.overlap`` allows; weights gathered
    after the update hide behind nothing; ZeRO-3 gathers a piece behind the one before, in forward and in backward.
    """
    dp, zero, m = job.layout.dp, job.zero, job.micro_batches
    if dp == 1:
        return 0.0
    numbers, stride = PRECISIONS[job.precision], job.layout.tp
    elements = rank_parameters(job, pp)
    mine = [times[stage] for stage in job.stages_of(pp)]
    forward = sum(t.forward for t in mine)
    backward = sum(t.input_grad + t.weight_grad for t in mine)

    def seconds(operation: str, width: int) -> float:
        return collective_seconds(cluster, operation, dp, stride, elements * width)

    def behind(message: float, compute: float) -> float:
        return max(message - cluster.overlap * compute, (1 - cluster.overlap) * message)

    if zero.stage == 0:
        return behind(seconds("all_reduce", numbers.gradient), backward)
    scatter = seconds("reduce_scatter", numbers.gradient)
    gather = seconds("all_gather", numbers.weight)
    if zero.stage == 3:
        return m * (behind(gather, forward) + behind(gather + scatter, backward))
    times_scattered = m if zero.every_micro_batch else 1
    return times_scattered * behind(scatter, backward) + gather


def update_seconds(job: Job, cluster: Cluster, pp: int) -> float:
    """Seconds of the optimizer's update of what a rank owns: on the device, or offloaded over PCIe and on the host."""
    owned = rank_parameters(job, pp) / (job.layout.dp if job.zero.stage else 1)
    if not job.zero.offload_optimizer:
        return owned * UPDATE_BYTES / cluster.device.memory_bytes_per_second
    numbers = PRECISIONS[job.precision]
    copies = owned * (numbers.gradient + numbers.weight) / cluster.host.bytes_per_second
    ranks_per_host = min(cluster.gpus_per_node, job.layout.world)
    return copies + host_adam_seconds(owned * ranks_per_host, cluster)


def host_adam_seconds(parameters: float, cluster: Cluster) -> float:
    """Seconds of one fp32 Adam update of so many parameters by one node's processors (ZeRO-Offload, Table 4)."""
    return parameters / cluster.host_adam_parameters_per_second


def exposed_host_seconds(job: Job, cluster: Cluster, pp: int, times: list[StageTime]) -> float:
    """Seconds of parameter offload: every gather first brings the rank's shard over PCIe."""
    if not job.zero.offload_param:
        return 0.0
    shard = rank_parameters(job, pp) * PRECISIONS[job.precision].weight / job.layout.dp
    copy = shard / cluster.host.bytes_per_second
    compute = sum(times[stage].total for stage in job.stages_of(pp))
    return job.micro_batches * max(0.0, 2 * copy - cluster.overlap * compute)


def step_time(job: Job, cluster: Cluster, *, simulated: bool = True, scattered_sends: bool = False) -> StepTime:
    """The time of one step.

    Args:
        simulated: play the schedule event by event; else the closed form, which is good enough for sorting.
        scattered_sends: each tp rank sends 1/tp of a message between stages, gathered again on arrival, as Megatron-LM
            does (arXiv:2104.04473 §4.1); our engine does not.
    """
    times = [stage_time(job, cluster, stage) for stage in range(job.stages)]
    ranks, m = job.layout.pp, job.micro_batches
    latency = 0.0
    if ranks > 1:
        message = activation_bytes(job)
        if scattered_sends and not job.slices_sequence:
            message //= job.layout.tp
        latency = send_seconds(cluster, job.layout.tp * job.layout.dp, ranks, message)
    busy = [m * sum(times[stage].total for stage in job.stages_of(pp)) for pp in range(ranks)]
    if simulated and ranks > 1:
        pipeline = play(job, times, latency).makespan
    else:
        pipeline = closed_form(job.schedule, times, job.virtual_stages, m, latency)
    slowest = max(range(ranks), key=busy.__getitem__)
    mine = [times[stage] for stage in job.stages_of(slowest)]
    data = max(
        exposed_data_seconds(job, cluster, pp, times) + exposed_host_seconds(job, cluster, pp, times)
        for pp in range(ranks)
    )
    update = max(update_seconds(job, cluster, pp) for pp in range(ranks))
    step = pipeline + data + update
    flops = model_flops(job.shape, job.sequence_length, job.global_batch)
    return StepTime(
        step=step,
        pipeline=pipeline,
        compute=m * sum(t.compute for t in mine),
        tensor=m * sum(t.messages for t in mine),
        bubble=max(0.0, pipeline - busy[slowest]),
        data=data,
        update=update,
        idle_fraction=1 - sum(busy) / ranks / pipeline,
        mfu=utilisation(flops, step, job.layout.world, cluster.device.peak_flops[job.precision]),
        simulated=simulated and ranks > 1,
    )
