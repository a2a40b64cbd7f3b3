"""What a training step costs a rank, as data: memory, traffic and time, each in one type wherever the number came from.

``source`` says who counted: "plan" (formulas), "rehearsal" (the engine on fake tensors) or "measured" (a real run). The
three are compared field by field, so they share these types and their conventions:

* bytes are integers; GiB = 2^30 bytes and GB = 10^9 bytes, and a text always says which;
* ``message_bytes`` is the payload of a collective: the tensor of an all-reduce, the gathered whole of an all-gather,
  the whole that a reduce-scatter sums, the bytes *sent* of a point-to-point message;
* ``ring_bytes`` is what one rank sends when the collective runs on a ring of n ranks: 2(n-1)/n of an all-reduce's
  payload, (n-1)/n of an all-gather's or reduce-scatter's, all of a point-to-point message. Groups of one send nothing.

Standard library only: the planner, the engine's ledger and a browser's Python all read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCES = ("plan", "rehearsal", "measured")
CATEGORIES = (
    "weights",
    "gradients",
    "master_weights",
    "optimizer",
    "activations",
    "buffers",
    "logits",
    "other",
)
GROUPS = ("tp", "dp", "pp", "embedding", "host")

GIB = 2**30
GB = 10**9


def gib(count: float) -> str:
    """Bytes in binary units for people, e.g. "24.2 GiB"; small amounts in MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _check_source(source: str) -> None:
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, not {source!r}")


def categories(given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Bytes by category with every category named, absent ones 0.

    Raises:
        ValueError: a category that is not in `CATEGORIES`.
    """
    given = given or {}
    unknown = [name for name in given if name not in CATEGORIES]
    if unknown:
        raise ValueError(f"unknown category {unknown[0]!r}; the categories are {', '.join(CATEGORIES)}")
    return {name: int(given.get(name, 0)) for name in CATEGORIES}


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank through one step.

    Attributes:
        rank: global rank.
        coords: ``{"pp": ..., "dp": ..., "tp": ...}``.
        parameters: elements this rank computes with (its part of the model; a ZeRO-3 shard counts its whole piece).
        peak_bytes: most bytes alive on the device at once.
        host_peak_bytes: most bytes this rank keeps in host memory at once.
        at_peak: what the device peak is made of, by category.
        moment: when the peak is, in words or as an action's label ("0B3": stage 0, backward, micro-batch 3).
        in_flight: most micro-batches whose activations are kept at once, summed over the rank's chunks.
    """

    rank: int
    coords: Mapping[str, int]
    parameters: int
    peak_bytes: int
    host_peak_bytes: int = 0
    at_peak: Mapping[str, int] = field(default_factory=categories)
    moment: str = ""
    in_flight: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields by name; ``at_peak`` with every category."""
        return {
            "rank": self.rank,
            "coords": dict(self.coords),
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "host_peak_bytes": self.host_peak_bytes,
            "at_peak": categories(self.at_peak),
            "moment": self.moment,
            "in_flight": self.in_flight,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RankMemory:
        """The inverse of `to_json`; unknown fields (such as traffic) are left to their readers."""
        return RankMemory(
            rank=data["rank"],
            coords=dict(data["coords"]),
            parameters=data["parameters"],
            peak_bytes=data["peak_bytes"],
            host_peak_bytes=data.get("host_peak_bytes", 0),
            at_peak=categories(data.get("at_peak")),
            moment=data.get("moment", ""),
            in_flight=data.get("in_flight", 0),
        )


@dataclass(frozen=True)
class MemoryReport:
    """The memory of some or all ranks of a layout.

    Attributes:
        source: one of `SOURCES`.
        ranks: one entry a rank; ranks alike by symmetry may be left out.
        usable_bytes: what a device offers to the program (its memory less headroom); None: not known, fits is None.
    """

    source: str
    ranks: tuple[RankMemory, ...]
    usable_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_source(self.source)

    @property
    def peak(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda r: r.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether every rank's peak is within ``usable_bytes``; None when that is not known."""
        return None if self.usable_bytes is None else self.peak.peak_bytes <= self.usable_bytes

    def to_json(self) -> dict[str, Any]:
        """``{source, fits, usable_bytes, ranks}``."""
        return {
            "source": self.source,
            "fits": self.fits,
            "usable_bytes": self.usable_bytes,
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MemoryReport:
        """The inverse of `to_json`."""
        ranks = tuple(RankMemory.from_json(rank) for rank in data["ranks"])
        return MemoryReport(data["source"], ranks, data.get("usable_bytes"))


# ---- traffic ---------------------------------------------------------------------------------------------------------

_RING_SHARE = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
}
ONE_WAY = ("send", "to_host", "to_device")


def ring_bytes(operation: str, size: int, message_bytes: int) -> int:
    """What one rank of ``size`` sends for one message, on a ring (see the module's conventions).

    Raises:
        KeyError: an operation that is not known.
    """
    if operation in ONE_WAY:
        return message_bytes
    return round(_RING_SHARE[operation] * (size - 1) * message_bytes / size)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends in one group in one step."""

    messages: int = 0
    message_bytes: int = 0
    ring_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.messages + other.messages,
            self.message_bytes + other.message_bytes,
            self.ring_bytes + other.ring_bytes,
        )

    def to_json(self) -> dict[str, int]:
        """``{messages, message_bytes, ring_bytes}``."""
        return {
            "messages": self.messages,
            "message_bytes": self.message_bytes,
            "ring_bytes": self.ring_bytes,
        }


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends in one step, by group; a group that carries nothing is left out.

    Raises:
        ValueError: a group that is not in `GROUPS`.
    """

    rank: int
    coords: Mapping[str, int]
    groups: Mapping[str, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.groups if name not in GROUPS]
        if unknown:
            raise ValueError(f"unknown group {unknown[0]!r}; the groups are {', '.join(GROUPS)}")

    def __getitem__(self, group: str) -> Traffic:
        return self.groups.get(group, Traffic())

    def to_json(self) -> dict[str, dict[str, int]]:
        """``{group: {messages, message_bytes, ring_bytes}}``."""
        return {name: self.groups[name].to_json() for name in GROUPS if name in self.groups}


@dataclass(frozen=True)
class TrafficReport:
    """The traffic of some or all ranks of a layout in one step."""

    source: str
    ranks: tuple[RankTraffic, ...]

    def __post_init__(self) -> None:
        _check_source(self.source)

    def to_json(self) -> dict[str, Any]:
        """``{source, ranks: [{rank, coords, traffic}]}``."""
        return {
            "source": self.source,
            "ranks": [{"rank": r.rank, "coords": dict(r.coords), "traffic": r.to_json()} for r in self.ranks],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TrafficReport:
        """The inverse of `to_json`; also reads the joined form of `StepReport`."""
        return TrafficReport(
            data["source"],
            tuple(
                RankTraffic(r["rank"], dict(r["coords"]), {g: Traffic(**t) for g, t in r["traffic"].items()})
                for r in data["ranks"]
            ),
        )


# ---- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """One action in time.

    Attributes:
        op: "F", "B", "I" or "W" (forward, whole backward, input gradient, weight gradient), or what else took time
            ("reduce", "step").
        micro_batch, stage: which; -1 where it has no meaning.
        start, end: in the timeline's unit.
    """

    op: str
    micro_batch: int
    stage: int
    start: float
    end: float

    @property
    def label(self) -> str:
        """As the ledger writes it: stage, op, micro-batch, e.g. "0F3"."""
        return f"{self.stage}{self.op}{self.micro_batch}" if self.micro_batch >= 0 else self.op

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What each rank of one pipeline does when.

    Attributes:
        source: one of `SOURCES`.
        ranks: for each rank its spans, in order of time.
        unit: of all times: "s", or "" for abstract units.
    """

    source: str
    ranks: tuple[tuple[Span, ...], ...]
    unit: str = "s"

    def __post_init__(self) -> None:
        _check_source(self.source)

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        spans = [span for rank in self.ranks for span in rank]
        return max(s.end for s in spans) - min(s.start for s in spans) if spans else 0.0

    def busy(self, rank: int) -> float:
        """Time a rank is computing."""
        return sum(span.duration for span in self.ranks[rank])

    @property
    def idle_fraction(self) -> float:
        """Idle time over makespan, mean of the ranks."""
        total = self.makespan
        if not total:
            return 0.0
        return sum(1 - self.busy(rank) / total for rank in range(len(self.ranks))) / len(self.ranks)

    @property
    def span_max(self) -> float:
        """The longest time from a rank's own first action to its last: the Zero-Bubble paper's cost."""
        return max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0.0)

    @property
    def bubble_rate(self) -> float:
        """(span_max - busy) / span_max with the busiest rank's busy time (arXiv:2401.10241, Table 5)."""
        longest = self.span_max
        busy = max((self.busy(rank) for rank in range(len(self.ranks))), default=0.0)
        return (longest - busy) / longest if longest else 0.0

    def to_json(self) -> dict[str, Any]:
        """``{source, unit, makespan, idle_fraction, span_max, bubble_rate, actions}``."""
        return {
            "source": self.source,
            "unit": self.unit,
            "makespan": self.makespan,
            "idle_fraction": self.idle_fraction,
            "span_max": self.span_max,
            "bubble_rate": self.bubble_rate,
            "actions": [
                [
                    {"op": s.op, "micro_batch": s.micro_batch, "stage": s.stage, "start": s.start, "end": s.end}
                    for s in rank
                ]
                for rank in self.ranks
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_json`."""
        ranks = tuple(tuple(Span(**span) for span in rank) for rank in data["actions"])
        return Timeline(data["source"], ranks, data.get("unit", "s"))


# ---- all of it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """Memory and traffic of a step, rank by rank, and its timeline when there is one.

    This is what ``plan --config``, ``rehearse`` and the end of ``train`` print with ``--json``.
    """

    memory: MemoryReport
    traffic: TrafficReport
    timeline: Timeline | None = None

    def __post_init__(self) -> None:
        if self.memory.source != self.traffic.source:
            raise ValueError(f"memory is {self.memory.source}, traffic is {self.traffic.source}")

    @property
    def source(self) -> str:
        return self.memory.source

    def __iter__(self) -> Iterator[tuple[RankMemory, RankTraffic]]:
        """Each rank's memory with its traffic."""
        traffic = {entry.rank: entry for entry in self.traffic.ranks}
        for memory in self.memory.ranks:
            yield memory, traffic.get(memory.rank, RankTraffic(memory.rank, memory.coords))

    def to_json(self) -> dict[str, Any]:
        """``{source, fits, usable_bytes, ranks: [{rank, coords, parameters, …, at_peak, traffic}]}``."""
        data = self.memory.to_json()
        data["ranks"] = [memory.to_json() | {"traffic": traffic.to_json()} for memory, traffic in self]
        if self.timeline is not None:
            data["timeline"] = self.timeline.to_json()
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> StepReport:
        """The inverse of `to_json`."""
        timeline = Timeline.from_json(data["timeline"]) if data.get("timeline") else None
        return StepReport(MemoryReport.from_json(data), TrafficReport.from_json(data), timeline)


def sum_categories(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Categories added up."""
    return categories({name: sum(part.get(name, 0) for part in parts) for name in CATEGORIES})
