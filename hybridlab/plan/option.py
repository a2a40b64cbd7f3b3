"""One way to run a job, priced: does it fit, and how long is a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridlab.plan.cluster import Cluster
from hybridlab.plan.job import Job
from hybridlab.plan.memory import Peak, peak
from hybridlab.plan.states import host_states
from hybridlab.plan.time import StepTime, step_time


@dataclass(frozen=True)
class Option:
    """A job on a cluster with what it costs.

    Attributes:
        peak: of the fullest rank.
        rank: the pipeline rank that is.
        host_bytes: of one node's memory, all its ranks together.
        usable_bytes, usable_host_bytes: what a card and a node's host offer.
        time: of a step.
    """

    job: Job
    peak: Peak
    rank: int
    host_bytes: int
    usable_bytes: int
    usable_host_bytes: int
    time: StepTime

    @property
    def fits(self) -> bool:
        """Whether both the cards and the hosts have room."""
        return self.peak.total <= self.usable_bytes and self.host_bytes <= self.usable_host_bytes

    def to_json(self) -> dict[str, Any]:
        """The choices, the peak and the times."""
        job, layout = self.job, self.job.layout
        return {
            "name": describe(job),
            "dp": layout.dp,
            "tp": layout.tp,
            "pp": layout.pp,
            "zero": job.zero.stage,
            "gradient_policy": job.zero.gradient_policy,
            "offload_optimizer": job.zero.offload_optimizer,
            "offload_param": job.zero.offload_param,
            "schedule": job.schedule if layout.pp > 1 else None,
            "virtual_stages": job.virtual_stages,
            "split": list(job.split),
            "sequence_parallel": job.sequence_parallel,
            "recompute": job.recompute,
            "micro_batch_size": job.micro_batch_size,
            "micro_batches": job.micro_batches,
            "sequence_length": job.sequence_length,
            "peak_bytes": self.peak.total,
            "peak_rank_pp": self.rank,
            "at_peak": dict(self.peak.bytes),
            "usable_bytes": self.usable_bytes,
            "host_bytes_per_node": self.host_bytes,
            "host_memory_bytes_per_node": self.usable_host_bytes,
            "fits": self.fits,
            "step_seconds": self.time.step,
            "idle_fraction": self.time.idle_fraction,
            "mfu": self.time.mfu,
            "seconds": {
                "compute": self.time.compute,
                "tensor": self.time.tensor,
                "bubble": self.time.bubble,
                "data": self.time.data,
                "update": self.time.update,
            },
        }


def price(job: Job, cluster: Cluster, *, simulated: bool = True, profile: str = "hybridlab") -> Option:
    """Memory of the fullest rank and host, and the time of a step.

    Args:
        simulated: see `hybridlab.plan.time.step_time`.
        profile: whose account of activations (`hybridlab.plan.activations`).
    """
    peaks = [(pp, peak(job, pp, profile=profile)) for pp in telling_ranks(job)]
    rank, worst = max(peaks, key=lambda found: found[1].total)
    return Option(
        job=job,
        peak=worst,
        rank=rank,
        host_bytes=host_bytes_per_node(job, cluster),
        usable_bytes=cluster.usable_bytes,
        usable_host_bytes=cluster.host_memory_bytes,
        time=step_time(job, cluster, simulated=simulated),
    )


def telling_ranks(job: Job) -> list[int]:
    """Pipeline ranks of which one has the highest peak: the first (most in flight, the embedding), the last (the
    logits), and where layers are dealt unevenly every one."""
    pp = job.layout.pp
    middle = set(job.split[1:-1])
    if pp > 3 and (len(middle) > 1 or max(job.split) > job.split[0]):
        return list(range(pp))
    return sorted({0, min(1, pp - 1), pp - 1})


def host_bytes_per_node(job: Job, cluster: Cluster) -> int:
    """Host memory of the fullest node: offloaded states of all its ranks."""
    if not (job.zero.offload_optimizer or job.zero.offload_param):
        return 0
    per_rank = max(sum(host_states(job, pp).values()) for pp in sorted({0, job.layout.pp - 1}))
    return per_rank * min(cluster.gpus_per_node, job.layout.world)


def describe(job: Job) -> str:
    """The choices in one line: "tp2·pp2·dp2 · ZeRO-2 · 1f1b · 1x32 · full recomputation"."""
    layout, zero = job.layout, job.zero
    degrees = "·".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "dp") if getattr(layout, axis) > 1)
    words = [degrees or "one card", f"ZeRO-{zero.stage}" if zero.stage else "no ZeRO"]
    if zero.stage == 2 and not zero.every_micro_batch and job.micro_batches > 1:
        words.append("accumulate first")
    if zero.offload_optimizer or zero.offload_param:
        words.append("offload" if not zero.offload_param else "offload with parameters")
    if layout.pp > 1:
        words.append(job.schedule + (f" v{job.virtual_stages}" if job.virtual_stages > 1 else ""))
    words.append(f"micro-batch {job.micro_batch_size}x{job.micro_batches}")
    if job.recompute != "none":
        words.append(f"{job.recompute} recomputation")
    return " · ".join(words)
