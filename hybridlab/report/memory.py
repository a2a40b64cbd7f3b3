"""Bytes alive on each rank through one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridlab.report.words import categories, check_source


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
        check_source(self.source)

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
