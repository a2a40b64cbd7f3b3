"""How long a message takes: α–β, on the slowest link its group crosses.

A collective on a ring moves (n-1)/n of its payload (an all-reduce twice that) past each rank at the ring's rate β, and
waits α for each of the log2(n) rounds of a tree that starts it. A group inside a node rides on the node's link. One
that reaches over several nodes enters and leaves each of them once, by the network cards of those of its members that
are in that node: with k members a node it has k cables. (NCCL does the same: nccl-tests, PERFORMANCE.md.)
"""

from __future__ import annotations

from math import ceil, log2

from hybridlab.plan.cluster import Cluster, Link
from hybridlab.report import ring_bytes

_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}


def group_link(cluster: Cluster, size: int, stride: int) -> Link:
    """The link that a group of ``size`` ranks, ``stride`` apart, is bound by.

    Args:
        stride: between neighbours of the group: 1 for tp, tp for dp, tp·dp for pp.
    """
    link = cluster.link(size * stride)
    if link is cluster.node:
        return link
    members = max(1, min(size, cluster.gpus_per_node // stride))
    rate = min(cluster.node.bytes_per_second, members * link.bytes_per_second)
    return Link(link.name, rate, link.latency_seconds)


def collective_seconds(cluster: Cluster, operation: str, size: int, stride: int, message_bytes: float) -> float:
    """Seconds of one collective of ``message_bytes`` (payload as in `hybridlab.report`)."""
    if size == 1:
        return 0.0
    link = group_link(cluster, size, stride)
    latency = _ROUNDS[operation] * ceil(log2(size)) * link.latency_seconds
    return latency + ring_bytes(operation, size, round(message_bytes)) / link.bytes_per_second


def send_seconds(cluster: Cluster, stride: int, pipeline: int, message_bytes: float) -> float:
    """Seconds from one pipeline stage to the next: each rank's own cable, the slowest boundary of the pipeline."""
    link = cluster.link(pipeline * stride)
    return link.latency_seconds + message_bytes / link.bytes_per_second
