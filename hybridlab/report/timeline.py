"""What each rank does when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridlab.report.words import check_source


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
        check_source(self.source)

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
