"""The peak memory of each rank: when it is, and what it is made of.

Long-lived states are there all the time (`hybridlab.plan.states`). On top come, at each action of the rank's schedule,
the activations of the micro-batches in flight (`in_flight`), what the running action itself needs for a moment, whole
gradient buckets and borrowed weights, and messages between stages. The peak is the largest sum over all moments; it is
seldom at the same moment on the first stage (most micro-batches in flight) as on the last (logits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridlab.cuts import padded_vocab
from hybridlab.plan.activations import PROFILES, Profile, layer_bytes
from hybridlab.plan.in_flight import Held, held_quickly
from hybridlab.plan.job import Job
from hybridlab.plan.states import device_states, gathered_weights, transient_gradients
from hybridlab.plan.traffic import activation_bytes
from hybridlab.report import categories

Bytes = dict[str, float]


@dataclass(frozen=True)
class ChunkCost:
    """Bytes by category that one micro-batch costs on one model chunk.

    Attributes:
        saved: kept from its F to its B.
        forward, backward: the moments of F and of B (or I) at which most is alive, what is saved included.
        pending: kept from I to W.
        weight_grad: the same moments of W, what is pending included.
    """

    saved: Bytes
    forward: tuple[Bytes, ...]
    backward: tuple[Bytes, ...]
    pending: Bytes = field(default_factory=dict)
    weight_grad: tuple[Bytes, ...] = ()


def chunk_cost(job: Job, stage: int, profile: str = "hybridlab") -> ChunkCost:
    """What a micro-batch costs on a virtual stage, by our engine's account or by a published one's."""
    if profile == "hybridlab":
        from hybridlab.plan.engine_tensors import engine_chunk

        return engine_chunk(job, stage)
    return _published(job, stage, PROFILES[profile])


def _published(job: Job, stage: int, profile: Profile) -> ChunkCost:
    """Layers times what a layer keeps; on the last stage the logits, at the moment of the loss."""
    saved = {"activations": len(job.layers_of(stage)) * layer_bytes(job, profile)}
    if job.recompute == "full":  # one layer's activations come back while it is run again
        again = layer_bytes(job.change(recompute="none", split=job.split), profile)
        backward = {"activations": saved["activations"] + again}
    else:
        backward = saved
    if stage < job.stages - 1:
        return ChunkCost(saved, (saved,), (backward,), saved, (saved,))
    columns = padded_vocab(job.shape.vocab, job.layout.tp, job.vocab_multiple) // job.layout.tp
    loss = saved | {"logits": profile.logit_bytes * job.tokens * columns}
    return ChunkCost(saved, (loss,), (loss, backward), saved, (saved,))


@dataclass(frozen=True)
class Peak:
    """The peak of one pipeline rank (all its tp and dp ranks hold as much).

    Attributes:
        bytes: by category.
        moment: the action at which it is, as the ledger labels it; "step": between backward and update.
        in_flight: most micro-batches of which anything is kept, over all chunks.
    """

    bytes: dict[str, int]
    moment: str
    in_flight: int

    @property
    def total(self) -> int:
        """All categories together."""
        return sum(self.bytes.values())


def peak(job: Job, pp: int, moments: Sequence[Held] | None = None, profile: str = "hybridlab") -> Peak:
    """The peak of a pipeline rank.

    Args:
        moments: from `hybridlab.plan.in_flight`; by default those of the job's schedule, by formula.
    """
    if moments is None:
        moments = held_quickly(job.schedule, job.layout.pp, job.micro_batches, job.virtual_stages, pp)
    stages = job.stages_of(pp)
    costs = [chunk_cost(job, stage, profile) for stage in stages]
    base = _always(job, pp)
    best, where, total = base, "step", _sum(base)
    for moment in moments:
        around = _add(base, *(_times(cost.saved, n) for cost, n in zip(costs, moment.kept)))
        around = _add(around, *(_times(cost.pending, n) for cost, n in zip(costs, moment.pending)))
        cost = costs[moment.chunk]
        running = {"F": cost.forward, "W": cost.weight_grad}.get(moment.op, cost.backward)
        for now in running:
            found = _add(around, now)
            if _sum(found) > total:
                label = f"{stages[moment.chunk]}{moment.op}{moment.micro_batch}"
                best, where, total = found, label, _sum(found)
    return Peak(categories(_rounded(best)), where, max(m.in_flight for m in moments))


def _always(job: Job, pp: int) -> Bytes:
    """States, and what comes and goes at every action: gradient buckets, borrowed weights, messages on their way."""
    transient = transient_gradients(job, pp)
    found: Bytes = dict(device_states(job, pp))
    found["buffers" if job.zero.every_micro_batch else "gradients"] += transient
    found["buffers"] += gathered_weights(job, pp)
    if job.layout.pp > 1:
        # A receive is posted one action ahead and a send lives until its receiver is known to have posted: about one
        # of each, and at the ends of the pipeline only one in all.
        found["activations"] += activation_bytes(job) * (2 if 0 < pp < job.layout.pp - 1 else 1)
    return found


def _add(*parts: Bytes) -> Bytes:
    found: Bytes = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


def _times(part: Bytes, n: int) -> Bytes:
    return {name: n * count for name, count in part.items()} if n else {}


def _sum(part: Bytes) -> float:
    return sum(part.values())


def _rounded(part: Bytes) -> dict[str, int]:
    return {name: round(count) for name, count in part.items()}
