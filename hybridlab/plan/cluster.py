"""Clusters as data: what a card can compute and hold, and how fast each kind of cable is.

Rates are *achieved* ones where a figure is known to be achievable in practice (links: what nccl-tests calls bus
bandwidth), and data-sheet peaks for dense matrix products, since model-FLOPs utilisation is defined against the peak.
How much of the peak a matrix product reaches depends on its width; `Device.efficiency` says how.

A file has the same fields as `Cluster.to_json` prints; `hybridlab doctor --measure` writes one for its own machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridlab.errors import UserError
from hybridlab.plan.units import parse_bytes

GIB = 2**30


@dataclass(frozen=True)
class Link:
    """A way for bytes to leave one card.

    Attributes:
        name: for people.
        bytes_per_second: what one card sends, one direction, when a ring of cards runs on this link.
        latency_seconds: of one hop, software included.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True)
class Device:
    """A card.

    Attributes:
        memory_bytes: all of it, before context and headroom.
        peak_flops: dense FLOP/s by precision ("bf16", "fp16", "fp32", "fp64").
        memory_bytes_per_second: of its own memory (HBM); element-wise work runs at this rate.
        best_efficiency: share of the peak that a very wide matrix product reaches.
        half_width: width (smallest dimension of the product on this rank) at which half of that is reached.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_second: float
    best_efficiency: float
    half_width: float

    def efficiency(self, width: float) -> float:
        """Share of the peak that a matrix product of this smallest dimension reaches: best·w/(w + half_width)."""
        return self.best_efficiency * width / (width + self.half_width)


@dataclass(frozen=True)
class Headroom:
    """What of a card's memory a program cannot have.

    Attributes:
        context_bytes: CUDA context, kernels and communication library buffers.
        fragmentation: share of the rest that an allocator cannot use.
    """

    context_bytes: int = 800 * 2**20
    fragmentation: float = 0.03

    def usable(self, memory_bytes: int) -> int:
        """Bytes left for the program."""
        return int((memory_bytes - self.context_bytes) * (1 - self.fragmentation))


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal cards.

    Attributes:
        node: the link between cards of a node.
        network: the link between nodes, per card.
        host: the link between a card and its host's memory.
        host_memory_bytes: of one node.
        host_adam_parameters_per_second: of one node's processors together, fp32 Adam.
        overlap: share of data-parallel communication that can hide behind backward.
    """

    name: str
    nodes: int
    gpus_per_node: int
    device: Device
    node: Link
    network: Link
    host: Link
    host_memory_bytes: int
    host_adam_parameters_per_second: float = 3.9e9
    overlap: float = 0.9
    headroom: Headroom = field(default_factory=Headroom)
    note: str = ""

    @property
    def gpus(self) -> int:
        """Cards in all."""
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> int:
        """What one card offers to the program."""
        return self.headroom.usable(self.device.memory_bytes)

    def link(self, span: int) -> Link:
        """The slowest link that a group crosses.

        Args:
            span: how many consecutive ranks the group reaches over, from its first to its last, both included. Groups
                start at multiples of their span, so a span that divides the node stays inside it.
        """
        inside = span <= self.gpus_per_node and self.gpus_per_node % span == 0
        return self.node if inside or self.nodes == 1 else self.network

    def with_gpus(self, gpus: int) -> Cluster:
        """The same machines, ``gpus`` cards in all: one smaller node, or as many whole nodes as it takes.

        Raises:
            UserError: more than one node, and not a whole number of them.
        """
        if gpus <= self.gpus_per_node:
            return replace(self, nodes=1, gpus_per_node=gpus)
        if gpus % self.gpus_per_node:
            below = gpus // self.gpus_per_node * self.gpus_per_node
            raise UserError(
                f"{gpus} GPUs are not a whole number of nodes of {self.gpus_per_node}.",
                key="--gpus",
                value=gpus,
                fix=f"{below} or {below + self.gpus_per_node}, or a --cluster with other nodes.",
            )
        return replace(self, nodes=gpus // self.gpus_per_node)

    def with_memory(self, memory_bytes: int) -> Cluster:
        """The same machines with this much memory on each card."""
        return replace(self, device=replace(self.device, memory_bytes=memory_bytes))

    def to_json(self) -> dict[str, Any]:
        """The file format: bytes, FLOP/s, bytes/s and seconds."""

        def link(given: Link) -> dict[str, Any]:
            return {
                "name": given.name,
                "bytes_per_second": given.bytes_per_second,
                "latency_seconds": given.latency_seconds,
            }

        return {
            "name": self.name,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "device": {
                "name": self.device.name,
                "memory_bytes": self.device.memory_bytes,
                "peak_flops": dict(self.device.peak_flops),
                "memory_bytes_per_second": self.device.memory_bytes_per_second,
                "best_efficiency": self.device.best_efficiency,
                "half_width": self.device.half_width,
            },
            "links": {"node": link(self.node), "network": link(self.network), "host": link(self.host)},
            "host_memory_bytes": self.host_memory_bytes,
            "host_adam_parameters_per_second": self.host_adam_parameters_per_second,
            "overlap": self.overlap,
            "headroom": {
                "context_bytes": self.headroom.context_bytes,
                "fragmentation": self.headroom.fragmentation,
            },
            "note": self.note,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "cluster") -> Cluster:
        """A cluster from its file. Memory may be written with a unit ("80GiB").

        Raises:
            UserError: a field that is missing, unknown or of the wrong kind; named with its path.
        """
        reader = _Reader(data, where)
        device, links = reader.part("device"), reader.part("links")
        headroom = reader.part("headroom", optional=True)
        cluster = Cluster(
            name=str(reader.take("name", "unnamed")),
            nodes=reader.count("nodes", 1),
            gpus_per_node=reader.count("gpus_per_node"),
            device=Device(
                name=str(device.take("name", "unnamed")),
                memory_bytes=parse_bytes(device.take("memory_bytes"), f"{where}.device.memory_bytes"),
                peak_flops={str(k): float(v) for k, v in device.part("peak_flops").rest().items()},
                memory_bytes_per_second=device.rate("memory_bytes_per_second"),
                best_efficiency=device.rate("best_efficiency", 0.7),
                half_width=device.rate("half_width", 0.0),
            ),
            node=_link(links.part("node")),
            network=_link(links.part("network", optional=True) if "network" in links.data else links.part("node")),
            host=_link(links.part("host")),
            host_memory_bytes=parse_bytes(reader.take("host_memory_bytes"), f"{where}.host_memory_bytes"),
            host_adam_parameters_per_second=reader.rate("host_adam_parameters_per_second", 3.9e9),
            overlap=reader.rate("overlap", 0.9),
            headroom=Headroom(
                context_bytes=parse_bytes(
                    headroom.take("context_bytes", Headroom().context_bytes), f"{where}.headroom.context_bytes"
                ),
                fragmentation=headroom.rate("fragmentation", Headroom().fragmentation),
            ),
            note=str(reader.take("note", "")),
        )
        for part in (reader, device, links, headroom):
            part.finish()
        return cluster


class _Reader:
    """Takes fields out of a JSON object one by one and says plainly what is missing, wrong or left over."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, Mapping):
            raise UserError("must be an object.", key=where, value=data, fix="see `Cluster.to_json` for the fields.")
        self.data, self.where, self.taken = data, where, set[str]()

    def take(self, name: str, default: Any = None) -> Any:
        self.taken.add(name)
        value = self.data.get(name, default)
        if value is None:
            raise UserError("is missing.", key=f"{self.where}.{name}", fix="give it, in bytes, FLOP/s or seconds.")
        return value

    def rate(self, name: str, default: float | None = None) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError("must be a number of at least 0.", key=f"{self.where}.{name}", value=value)
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError("must be a whole number of at least 1.", key=f"{self.where}.{name}", value=value)
        return value

    def part(self, name: str, optional: bool = False) -> _Reader:
        return _Reader(self.take(name, {} if optional else None), f"{self.where}.{name}")

    def rest(self) -> Mapping[str, Any]:
        for name, value in self.data.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError("must be a number.", key=f"{self.where}.{name}", value=value)
        return self.data

    def finish(self) -> None:
        for name in self.data:
            if name not in self.taken:
                close = difflib.get_close_matches(name, self.taken, n=1)
                raise UserError(
                    "is no field of a cluster.",
                    key=f"{self.where}.{name}",
                    value=self.data[name],
                    fix=f"did you mean {close[0]}?" if close else "remove it.",
                )


def _link(reader: _Reader) -> Link:
    link = Link(str(reader.take("name", "link")), reader.rate("bytes_per_second"), reader.rate("latency_seconds", 0.0))
    reader.finish()
    return link
