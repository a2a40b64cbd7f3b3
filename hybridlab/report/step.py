"""All that a step costs: memory, traffic, time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybridlab.report.memory import MemoryReport, RankMemory
from hybridlab.report.timeline import Timeline
from hybridlab.report.traffic import RankTraffic, TrafficReport


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
