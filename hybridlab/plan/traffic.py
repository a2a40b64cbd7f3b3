"""What each rank sends in one step, group by group: every collective and point-to-point message of the engine, counted.

============  =========================================================================  ===============================
group         per layer and micro-batch                                                  per step
============  =========================================================================  ===============================
tp            all-reduces of [b, s, h]: 2 forward, 2 backward; under sequence            sums owed by uncut parameters
              parallelism 4 gathers or scatters forward, 6 backward
dp            ZeRO-3: 2 gathers of the weights, 1 scatter of their gradients; ZeRO-2     ZeRO-0: all-reduce gradients;
              scattering every micro-batch: 1 scatter                                    1, 2: scatter, gather weights
pp            one activation forward, its gradient back, at each boundary
embedding                                                                                the tied gradient, summed
host          parameter offload: weight shards up before each gather                     gradients down, weights up
============  =========================================================================  ===============================

Sources: Megatron-LM, arXiv:1909.08053 §3; sequence parallelism, arXiv:2205.05198 §4.2.2 (with the inputs of column-cut
layers gathered again in backward instead of kept); ZeRO, arXiv:1910.02054 §7; ring volumes as in `hybridlab.report`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridlab.plan.buckets import Bucket, lay_out, share
from hybridlab.plan.job import Job
from hybridlab.plan.split import rank_of_stage
from hybridlab.plan.states import PRECISIONS
from hybridlab.report import RankTraffic, Traffic, TrafficReport, ring_bytes

# Control messages, in bytes: the number of target tokens (int64, over dp where the loss is) and, after backward, the
# three numbers every rank must agree on (float64: squared gradient norm, loss, tokens).
TOKEN_COUNT_BYTES = 8
AGREED_BYTES = 3 * 8
AGREED_BYTES_PLAIN_DP = 2 * 8  # at ZeRO-0 each replica knows the whole norm: only loss and tokens are summed over dp

ROW_SUMS_PER_LAYER = 2  # attention output and MLP output: summed forward
COLUMN_SUMS_PER_LAYER = 2  # inputs of q,k,v (one matrix) and of the MLP: their gradients are summed backward


@dataclass
class Tally:
    """Adds messages up by group."""

    groups: dict[str, Traffic] = field(default_factory=dict)

    def add(self, group: str, operation: str, size: int, message_bytes: int, times: int = 1) -> None:
        """``times`` messages of ``message_bytes`` in a group of ``size`` ranks. A group of one sends nothing."""
        if times == 0 or (size == 1 and group != "host"):
            return
        sent = Traffic(times, times * message_bytes, times * ring_bytes(operation, size, message_bytes))
        self.groups[group] = self.groups.get(group, Traffic()) + sent


def rank_traffic(job: Job, rank: int) -> RankTraffic:
    """What one rank sends in one step."""
    coords = job.layout.coords(rank)
    tally = Tally()
    tensor_parallel(job, coords["pp"], tally)
    pipeline(job, coords["pp"], tally)
    data_parallel(job, coords["pp"], tally)
    owed_sums(job, coords["pp"], coords["dp"], tally)
    host(job, coords["pp"], tally)
    control(job, coords["pp"], tally)
    return RankTraffic(rank, coords, tally.groups)


def traffic_report(job: Job, ranks: list[int] | None = None) -> TrafficReport:
    """All ranks, or those given."""
    chosen = range(job.layout.world) if ranks is None else ranks
    return TrafficReport("plan", tuple(rank_traffic(job, rank) for rank in chosen))


# ---- one function a group ------------------------------------------------------------------------------------------


def tensor_parallel(job: Job, pp: int, tally: Tally) -> None:
    """The sums inside layers, at the embedding, the head and the loss. Full recomputation runs forward's again.

    Without sequence parallelism every message is an all-reduce of the whole [b, s, h]. With it, an all-reduce is a
    reduce-scatter and an all-gather: as many bytes, twice the messages; and column-cut layers gather their input once
    more in backward, for the weight gradient.
    """
    tp, m = job.layout.tp, job.micro_batches
    if tp == 1:
        return
    numbers = PRECISIONS[job.precision]
    whole = job.tokens * job.shape.hidden * numbers.weight
    forwards = 2 if job.recompute == "full" else 1
    for stage in job.stages_of(pp):
        layers = len(job.layers_of(stage))
        first, last = stage == 0, stage == job.stages - 1
        if not job.slices_sequence:
            forward = layers * ROW_SUMS_PER_LAYER
            backward = layers * COLUMN_SUMS_PER_LAYER + last
            tally.add("tp", "all_reduce", tp, whole, m * (forwards * forward + backward + first))
        else:
            gathers = layers * COLUMN_SUMS_PER_LAYER * forwards + last  # forward: inputs of column-cut layers
            gathers += layers * (ROW_SUMS_PER_LAYER + COLUMN_SUMS_PER_LAYER) + last + first
            scatters = layers * ROW_SUMS_PER_LAYER * forwards + first
            scatters += layers * COLUMN_SUMS_PER_LAYER + last
            tally.add("tp", "all_gather", tp, whole, m * gathers)
            tally.add("tp", "reduce_scatter", tp, whole, m * scatters)
        if last:  # vocabulary-parallel cross-entropy: the maximum; then target logit, Σ exp (and Σ logits, smoothed)
            number = max(4, numbers.update if job.precision == "fp64" else 4)
            tally.add("tp", "all_reduce", tp, job.tokens * number, m)
            parts = 3 if job.label_smoothing else 2
            tally.add("tp", "all_reduce", tp, parts * job.tokens * number, m)


def activation_bytes(job: Job) -> int:
    """The message between stages: [b, s, h], or [b, s/tp, h] under sequence parallelism, in the compute dtype."""
    positions = job.sequence_length // job.layout.tp if job.slices_sequence else job.sequence_length
    return job.micro_batch_size * positions * job.shape.hidden * PRECISIONS[job.precision].weight


def pipeline(job: Job, pp: int, tally: Tally) -> None:
    """Activations to the next stage and gradients to the one before, unless that is on this rank too."""
    degree = job.layout.pp
    if degree == 1:
        return
    place = [rank_of_stage(stage, degree, job.placement) for stage in range(job.stages)]
    for stage in job.stages_of(pp):
        forward = stage + 1 < job.stages and place[stage + 1] != pp
        backward = stage > 0 and place[stage - 1] != pp
        tally.add("pp", "send", 2, activation_bytes(job), job.micro_batches * (forward + backward))


def data_parallel(job: Job, pp: int, tally: Tally) -> None:
    """Gradients over the replicas and, with ZeRO, weights back: the collectives of each bucket."""
    dp, m, zero = job.layout.dp, job.micro_batches, job.zero
    numbers = PRECISIONS[job.precision]
    for chunk, buckets in enumerate(lay_out(job, pp)):
        for bucket in buckets:
            gradient, weight = bucket.numel * numbers.gradient, bucket.numel * numbers.weight
            if zero.stage == 0:
                tally.add("dp", "all_reduce", dp, gradient)
                continue
            scatters = m if zero.every_micro_batch and not bucket.late else 1
            tally.add("dp", "reduce_scatter", dp, gradient, scatters)
            if zero.stage < 3 or bucket.persistent:
                tally.add("dp", "all_gather", dp, weight)  # after the update
            else:
                tally.add("dp", "all_gather", dp, weight, m * gathers(job, pp, chunk, bucket))


def gathers(job: Job, pp: int, chunk: int, bucket: Bucket) -> int:
    """How often a micro-batch gathers a bucket at ZeRO-3: before forward and backward of each piece that uses it.

    When layers are recomputed in groups, all of a group but its last are gathered a third time, to be run again.
    """
    holds_embedding = any(p.name == "tokens.weight" for p in bucket.parameters)
    shared = holds_embedding and job.shape.tied and not job.tied_apart  # the head uses it too
    times = 4 if shared else 2
    if job.recompute == "full" and job.recompute_interval > 1 and bucket.piece >= 0:
        stage = job.stages_of(pp)[chunk]
        layer, layers = bucket.piece - (stage == 0), len(job.layers_of(stage))
        if 0 <= layer < layers:
            ends_group = (layer + 1) % job.recompute_interval == 0 or layer == layers - 1
            times += 0 if ends_group else 1
    return times


def owed_sums(job: Job, pp: int, dp: int, tally: Tally) -> None:
    """Sums that tensor parallelism and tied embeddings owe, paid once a step on what this rank's optimizer updates."""
    width, tp = PRECISIONS[job.precision].gradient, job.layout.tp
    buckets = [bucket for chunk in lay_out(job, pp) for bucket in chunk]
    kv_copies = max(1, tp // job.shape.kv_heads)
    for copies in sorted({kv_copies, tp} - {1}):
        owed = 0
        for bucket in buckets:
            mine = share(job, bucket)
            begin = dp * mine if job.zero.stage else 0
            owed += bucket.partial(copies, begin, begin + mine)
        if owed:
            tally.add("tp", "all_reduce", copies, owed * width)
    if job.tied_apart:
        tied = sum(share(job, bucket) for bucket in buckets if bucket.tied)
        if tied:
            tally.add("embedding", "all_reduce", 2, tied * width)


def host(job: Job, pp: int, tally: Tally) -> None:
    """Over PCIe: offloaded optimizers send gradients down (gradient dtype) and weights up (compute dtype), bucket by
    bucket, once a step; offloaded parameters come up before every gather."""
    zero, numbers = job.zero, PRECISIONS[job.precision]
    if not (zero.offload_optimizer or zero.offload_param):
        return
    for chunk, buckets in enumerate(lay_out(job, pp)):
        for bucket in buckets:
            mine = share(job, bucket)
            away = zero.offload_param and zero.stage == 3 and not bucket.persistent
            if zero.offload_optimizer:
                tally.add("host", "to_host", 1, mine * numbers.gradient)
                if not away:
                    tally.add("host", "to_device", 1, mine * numbers.weight)
            elif away:
                tally.add("host", "to_host", 1, mine * numbers.weight)
            if away:
                times = job.micro_batches * gathers(job, pp, chunk, bucket)
                tally.add("host", "to_device", 1, mine * numbers.weight, times)


def control(job: Job, pp: int, tally: Tally) -> None:
    """A handful of scalars: the batch's target tokens; gradient norm, loss and tokens agreed by all ranks."""
    layout = job.layout
    if job.stages - 1 in job.stages_of(pp):
        tally.add("dp", "all_reduce", layout.dp, TOKEN_COUNT_BYTES)
    tally.add("tp", "all_reduce", layout.tp, AGREED_BYTES)
    tally.add("pp", "all_reduce", layout.pp, AGREED_BYTES)
    tally.add("dp", "all_reduce", layout.dp, AGREED_BYTES if job.zero.stage else AGREED_BYTES_PLAIN_DP)
